"""Building a model in the memory it runs in, and filling it from a checkpoint or with random numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config import EngineConfig, ModelConfig
from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.draft_head import DraftHead
from slipstream.models.mtp_head import is_mtp_tensor
from slipstream.models.registry import Architecture, architecture_of
from slipstream.models.tensor_header import TensorHeader
from slipstream.models.weights import Checkpoint, open_checkpoint
from slipstream.values import describe_value

# Checkpoints may carry these; the engine computes them itself.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", "rope_freqs.weight")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_EXPERT = re.compile(r"\.experts\.([0-9]{1,9})\.")


def open_decoder(path: Path) -> Checkpoint:
    """Open the checkpoint of a whole model. What its config says is compared with its tensors, from headers alone.

    After this no count of the config is larger than the files bear out, and nothing was built or allocated for it.
    """
    checkpoint = open_checkpoint(path)
    architecture = architecture_of(checkpoint.config)
    config = architecture.read_config(checkpoint.config)
    headers = checkpoint.tensor_headers()
    _check_counts(config, headers, str(path))
    with torch.device("meta"):  # shapes without memory
        model = architecture(config, max_position=1)
        for _ in _match_slots(model, ((header.name, header.make_meta_tensor()) for header in headers)):
            pass
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
    with built_under(config, device):
        return architecture(model or config.model, config.scheduler.max_model_len)


@contextmanager
def built_under(config: EngineConfig, device: torch.device) -> Iterator[None]:
    """What is made inside has the engine's type and lives on its device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.dtype))
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def count_parameters(architecture: Architecture, config: ModelConfig) -> int:
    with torch.device("meta"):  # shapes without memory
        return sum(parameter.numel() for parameter in architecture(config, max_position=1).parameters())


@torch.inference_mode()
def load_weights(model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor to its place; a missing, unknown or misshapen one is an error that names it."""
    for slot, tensor in _match_slots(model, tensors):
        slot.copy_(tensor)


def _match_slots(model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The place of each tensor, beside it."""
    slots = dict(model.slots())
    for name, tensor in _translated(model, tensors):
        slot = slots.pop(name, None)
        if slot is None:
            if name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and model.lm_head is None):
                continue
            if is_mtp_tensor(name, model.config.num_layers):
                continue  # they draft; who wants that reads them by itself
            raise ModelError(
                f"tensor {describe_value(name)} does not belong to {model.config.architecture}, or occurs twice"
            )
        if slot.shape != tensor.shape:
            raise ModelError(f"tensor '{name}' has shape {list(tensor.shape)}, the config says {list(slot.shape)}")
        if not tensor.is_floating_point():
            raise ModelError(f"tensor '{name}' holds {tensor.dtype}, which are no weights; use another format")
        yield slot, tensor
    if slots:
        raise ModelError(f"the checkpoint lacks {len(slots)} tensors, among them '{next(iter(slots))}'")


def _translated(model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield from model.translate(name, tensor)


@torch.inference_mode()
def randomize_weights(model: Decoder | DraftHead, seed: int = 0) -> None:
    """Random weights of sane size, for benchmarks of a shape whose real weights are not at hand."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for name, slot in model.slots():
        if "norm" in name:
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, 0.02, generator=generator)
