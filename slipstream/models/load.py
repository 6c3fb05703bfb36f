"""Building a network in the memory it runs in, measuring one that has none, and filling one with weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from slipstream.config import EngineConfig, ModelConfig, NetworkSize
from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.experts import ExpertWeights
from slipstream.models.layers import Embedding, Linear
from slipstream.models.registry import Architecture, architecture_of
from slipstream.models.tensor_header import TensorHeader
from slipstream.models.weights import Checkpoint, open_checkpoint
from slipstream.values import describe_value
from slipstream.weights.matrix import ExpertMatrices, Matrix, PackingSlot, Slot, StoredExperts, StoredWeight

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_EXPERT = re.compile(r"\.experts\.([0-9]{1,9})\.")


class Loadable(Protocol):
    """A network that is filled from a checkpoint: a decoder, or a draft head."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def source(self) -> str:
        """What messages call the checkpoint."""
        ...

    @property
    def hints(self) -> Mapping[str, str]:
        """What a wrong shape of a tensor may come from, by the name of its slot."""
        ...

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Every tensor that a checkpoint must bring, by its name there, beside where it goes."""
        ...

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """What a tensor of the checkpoint brings, by the names of ``slots`` and ``optional``."""
        ...

    def optional(self) -> Mapping[str, Tensor]:
        """What a checkpoint may bring beside the slots: tensors without memory, of the shape and type it must have."""
        ...

    def adopt(self, name: str, file_name: str, tensor: Tensor) -> None:
        """Take one of those."""
        ...

    def passes_over(self, name: str) -> bool:
        """Whether a tensor is of no use here, though checkpoints carry it."""
        ...

    def finish_loading(self) -> None:
        """When all tensors are there: what follows from them together."""
        ...


class Placement(NamedTuple):
    """Where a network lives, and the type of its numbers."""

    device: torch.device
    dtype: torch.dtype
    keep_blocks: bool = False  # of GGUF files, as far as that device has kernels for them

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> Placement:
        return cls(device, getattr(torch, config.dtype))


def open_decoder(path: Path, keep_blocks: bool = False) -> Checkpoint:
    """Open the checkpoint of a whole model. What its config says is compared with its tensors, from headers alone.

    After this no count of the config is larger than the files bear out, and nothing was built or allocated for it.
    """
    checkpoint = open_checkpoint(path, keep_blocks)
    architecture = architecture_of(checkpoint.config)
    config = architecture.read_config(checkpoint.config)
    headers = checkpoint.tensor_headers()
    _check_counts(config, headers, str(path))
    with torch.device("meta"):  # shapes without memory
        check_tensors(architecture(config, max_position=1), headers)
    return checkpoint


def _check_counts(config: ModelConfig, headers: list[TensorHeader], source: str) -> None:
    """Before anything is built: every layer and every expert has tensors, or rows of one."""
    layers = {match[1] for header in headers if (match := _LAYER.match(header.name))}
    if config.num_layers > len(layers):
        raise ModelError(
            f"{source} has weights of {len(layers)} layers, its config says {config.num_layers}; download it again"
        )
    if config.experts is None:
        return
    one_by_one = {match[1] for header in headers if (match := _EXPERT.search(header.name))}
    joined = [header.shape[0] for header in headers if ".experts." in header.name and len(header.shape) == 3]
    num_experts = max(len(one_by_one), *joined, 0)
    if config.experts.num_experts > num_experts:
        raise ModelError(
            f"{source} has weights of {num_experts} experts, its config says {config.experts.num_experts}; "
            "download it again"
        )


def build_model(
    architecture: Architecture, config: EngineConfig, device: torch.device, model: ModelConfig | None = None
) -> Decoder:
    """The target, unless another model is named."""
    with built_under(Placement.of(config, device)):
        return architecture(model or config.model, config.scheduler.max_model_len)


@contextmanager
def built_under(placement: Placement) -> Iterator[None]:
    """What is made inside has this type and lives on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(placement.dtype)
    try:
        with placement.device:
            yield
    finally:
        torch.set_default_dtype(before)


# --- measuring ------------------------------------------------------------------------------------


def measure_model(architecture: Architecture, config: ModelConfig, placement: Placement) -> NetworkSize:
    """Of a model that is not built yet."""
    with built_under(placement._replace(device=torch.device("meta"))):  # shapes without memory
        model = architecture(config, max_position=1)
        num_params = count_parameters(model)
        model.finish_weights(placement.device)
    return NetworkSize(num_params, count_bytes(model), name_formats(model))


def count_parameters(network: nn.Module) -> int:
    """Numbers that the checkpoint says, however they are stored. Asked before the weights are finished."""
    total = 0
    for module in network.modules():
        if isinstance(module, Linear | ExpertWeights):
            total += module.shape.num_params
        elif isinstance(module, Embedding):
            total += module.vocab_size * module.size
        if not isinstance(module, StoredWeight | StoredExperts | Matrix | ExpertMatrices):
            total += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return total


def count_bytes(network: nn.Module) -> int:
    """Of all weights as they lie in memory; what two layers share counts once."""
    return sum(parameter.nbytes for parameter in network.parameters())


def name_formats(network: nn.Module) -> str:
    """The kinds of numbers that its products read, most of them first; what is not a hundredth is left out."""
    found: Counter[str] = Counter()
    for module in network.modules():
        if isinstance(module, Linear):
            found.update(module.matrix.formats())
        elif isinstance(module, ExpertWeights):
            found.update(module.matrices.formats())
    total = found.total()
    return ", ".join(name for name, count in found.most_common() if 100 * count >= total)


# --- loading --------------------------------------------------------------------------------------


class _Match(NamedTuple):
    name: str  # of the slot
    file_name: str  # in the checkpoint
    tensor: Tensor
    slot: Slot | None  # None: the network may adopt it


def check_tensors(network: Loadable, headers: Iterable[TensorHeader]) -> None:
    """Compare a network without memory with the headers of its checkpoint: the errors of ``load_weights``, early."""
    for _ in _match_tensors(network, ((header.name, header.make_meta_tensor()) for header in headers)):
        pass


OnLoaded = Callable[[float], None]  # the share of a checkpoint's tensors that are there


def report_loading(checkpoint: Checkpoint, on_loaded: OnLoaded | None) -> Iterator[tuple[str, Tensor]]:
    """Its tensors, and how far they are."""
    count = max(1, len(checkpoint.tensor_names()))
    for idx, named in enumerate(checkpoint.tensors()):
        if on_loaded is not None:
            on_loaded(idx / count)
        yield named


@torch.inference_mode()
def load_weights(network: Loadable, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor to its place; a missing, unknown or misshapen one is an error that names it."""
    for name, file_name, tensor, slot in _match_tensors(network, tensors):
        if slot is None:
            network.adopt(name, file_name, tensor)
        elif isinstance(slot, PackingSlot):
            slot.fill(tensor)
        else:
            slot.copy_(tensor)
    network.finish_loading()


def _match_tensors(network: Loadable, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[_Match]:
    slots, optional = dict(network.slots()), network.optional()
    for file_name, tensor in tensors:
        for name, part in network.translate(file_name, tensor):
            slot = slots.pop(name, None)
            expected = slot.expected if isinstance(slot, PackingSlot) else slot
            if expected is None:
                expected = optional.get(name)
            if expected is not None:
                # A tensor that holds several weights is cut; what does not fit is then one of those.
                said = file_name if part.shape == tensor.shape else name
                _check_fits(said, part, expected, network.hints.get(name, ""))
                yield _Match(name, file_name, part, slot)
            elif not network.passes_over(name):
                raise ModelError(
                    f"tensor {describe_value(file_name)} does not belong to {network.config.architecture}, "
                    "or occurs twice"
                )
    if slots:
        raise ModelError(f"{network.source} lacks {len(slots)} tensors, among them '{next(iter(slots))}'")


def _check_fits(name: str, tensor: Tensor, expected: Tensor, hint: str) -> None:
    if tensor.shape != expected.shape:
        raise ModelError(
            f"tensor '{name}' has shape {list(tensor.shape)}, the config says {list(expected.shape)}{hint}"
        )
    if expected.is_floating_point():
        if not tensor.is_floating_point():
            raise ModelError(f"tensor '{name}' holds {tensor.dtype}, which are no weights; use another format")
    elif tensor.is_floating_point() or tensor.dtype.itemsize > expected.dtype.itemsize:
        raise ModelError(f"tensor '{name}' holds {tensor.dtype}, the config says {expected.dtype}")


@torch.inference_mode()
def randomize_weights(network: Loadable, seed: int = 0) -> None:
    """Random weights of sane size, for benchmarks of a shape whose real weights are not at hand."""
    slots = {name: slot for name, slot in network.slots() if isinstance(slot, Tensor)}
    generator = torch.Generator(device=next(iter(slots.values())).device).manual_seed(seed)
    for name, slot in slots.items():
        if "norm" in name:
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, 0.02, generator=generator)
