"""Building a network, measuring one without memory, and loading weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from slipstream.checkpoints.checkpoint import Checkpoint, open_checkpoint
from slipstream.checkpoints.tensor_header import TensorHeader
from slipstream.config import EngineConfig, ModelConfig, NetworkSize
from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.experts import ExpertWeights
from slipstream.models.layers import Embedding, Linear
from slipstream.models.registry import Architecture, architecture_of
from slipstream.values import describe_value
from slipstream.weights.matrix import ExpertMatrices, Matrix, PackingSlot, Slot, StoredExperts, StoredWeight

_SOURCE_LAYER = re.compile(r"model\.encoder\.layers\.([0-9]{1,9})\.")
_EXPERT = re.compile(r"\.experts\.([0-9]{1,9})\.")


class Loadable(Protocol):
    """A network that is loaded from a checkpoint: a decoder, or a draft head."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def source(self) -> str:
        """The name of the checkpoint in messages."""
        ...

    @property
    def hints(self) -> Mapping[str, str]:
        """Likely reasons for a tensor's wrong shape, by the name of its slot."""
        ...

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Every tensor that a checkpoint must bring, by its name there, with its destination."""
        ...

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The network's tensors that a checkpoint's tensor holds, by the names of ``slots`` and ``optional``."""
        ...

    def optional(self) -> Mapping[str, Tensor]:
        """Tensors that a checkpoint may bring in addition: without memory, of the shape and type they must have."""
        ...

    def adopt(self, name: str, file_name: str, tensor: Tensor) -> None:
        """Use one of the optional tensors."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor is not needed here, although checkpoints carry it."""
        ...

    def finish_loading(self) -> None:
        """Called when all tensors are loaded: compute what depends on several of them."""
        ...


class Placement(NamedTuple):
    """The device of a network, and the type of its numbers."""

    device: torch.device
    dtype: torch.dtype
    keep_blocks: bool = False  # keep the blocks of GGUF files, where that device has kernels for them

    @classmethod
    def from_config(cls, config: EngineConfig, device: torch.device) -> Placement:
        return cls(device, getattr(torch, config.dtype))


def open_decoder(path: Path, keep_blocks: bool = False) -> Checkpoint:
    """Open the checkpoint of a whole model and compare its config with its tensors, from headers alone.

    After this every count of the config is confirmed by tensors, and nothing was built or allocated for it.
    """
    checkpoint = open_checkpoint(path, keep_blocks)
    architecture = architecture_of(checkpoint.config)
    config = architecture.read_config(checkpoint.config)
    headers = checkpoint.tensor_headers()
    _check_counts(config, headers, architecture.layer_pattern, str(path))
    with torch.device("meta"):  # shapes without memory
        check_tensors(architecture(config, max_position=1), headers)
    return checkpoint


def _check_counts(
    config: ModelConfig, headers: list[TensorHeader], layer_pattern: re.Pattern[str], source: str
) -> None:
    """Called before anything is built: every layer and every expert must have tensors, or rows of one."""
    num_source_layers = 0 if config.source_encoder is None else config.source_encoder.num_layers
    for pattern, count in ((layer_pattern, config.num_layers), (_SOURCE_LAYER, num_source_layers)):
        layers = {match[1] for header in headers if (match := pattern.match(header.name))}
        if count > len(layers):
            raise ModelError(
                f"{source} has weights of {len(layers)} layers, its config says {count}; download it again"
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
    """The target, unless another model is given."""
    with built_under(Placement.from_config(config, device)):
        return architecture(model or config.model, config.scheduler.max_model_len)


@contextmanager
def built_under(placement: Placement) -> Iterator[None]:
    """Modules built inside have this type and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(placement.dtype)
    try:
        with placement.device:
            yield
    finally:
        torch.set_default_dtype(before)


# --- measuring ------------------------------------------------------------------------------------


def measure_model(architecture: Architecture, config: ModelConfig, placement: Placement) -> NetworkSize:
    """Measures a model that is not built yet."""
    with built_under(placement._replace(device=torch.device("meta"))):  # shapes without memory
        model = architecture(config, max_position=1)
        num_params = count_parameters(model)
        model.finish_weights(placement.device)
    return NetworkSize(num_params, count_bytes(model), name_formats(model), name_inexact(model, placement.device))


def count_parameters(network: nn.Module) -> int:
    """Parameters as in the checkpoint, however they are stored. Call it before the weights are finished."""
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
    """Memory of all weights in their final layout; what two layers share counts once."""
    return sum(parameter.nbytes for parameter in network.parameters())


def name_formats(network: nn.Module) -> str:
    """The formats of the weights that its products read, most frequent first; those below one percent are left out."""
    found: Counter[str] = Counter()
    for module in network.modules():
        if isinstance(module, Linear):
            found.update(module.matrix.formats())
        elif isinstance(module, ExpertWeights):
            found.update(module.matrices.formats())
    total = found.total()
    return ", ".join(name for name, count in found.most_common() if 100 * count >= total)


def name_inexact(network: nn.Module, device: torch.device) -> str:
    """Of finished weights: which products depend, in their last bits, on the batch; empty if none do."""
    found: set[str] = set()
    for module in network.modules():
        if isinstance(module, Linear) and module.matrix.exact(device) is None:
            found.update(f"products with weights in {name}" for name in module.matrix.formats())
        elif isinstance(module, ExpertWeights) and not module.matrices.is_exact(device):
            found.update(f"experts in {name}" for name in module.matrices.formats())
    return ", ".join(sorted(found))


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


OnLoaded = Callable[[float], None]  # the share of a checkpoint's tensors that are loaded


def report_loading(checkpoint: Checkpoint, on_loaded: OnLoaded | None) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors, reporting progress."""
    count = max(1, len(checkpoint.tensor_names()))
    for idx, named in enumerate(checkpoint.tensors()):
        if on_loaded is not None:
            on_loaded(idx / count)
        yield named


@torch.inference_mode()
def load_weights(network: Loadable, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor to its slot; a missing, unknown or misshapen one is an error that names it."""
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
                # A tensor that holds several weights is split; an error then names one of those.
                said = file_name if part.shape == tensor.shape else name
                _check_fits(said, part, expected, network.hints.get(name, ""))
                yield _Match(name, file_name, part, slot)
            elif not network.ignores(name):
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
        # Floats of eight bits mean nothing without their scales.
        if tensor.dtype != expected.dtype and 1 in (tensor.dtype.itemsize, expected.dtype.itemsize):
            raise ModelError(f"tensor '{name}' holds {tensor.dtype}, the config says {expected.dtype}")
    elif tensor.is_floating_point() or tensor.dtype.itemsize > expected.dtype.itemsize:
        raise ModelError(f"tensor '{name}' holds {tensor.dtype}, the config says {expected.dtype}")


@torch.inference_mode()
def randomize_weights(network: Loadable, seed: int = 0) -> None:
    """Random weights of reasonable magnitude, for benchmarks of a shape without its real weights."""
    slots = {name: slot for name, slot in network.slots() if isinstance(slot, Tensor)}
    generator = torch.Generator(device=next(iter(slots.values())).device).manual_seed(seed)
    for name, slot in slots.items():
        if "norm" in name:
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, 0.02, generator=generator)
