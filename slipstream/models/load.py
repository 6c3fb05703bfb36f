"""Building a model in the memory it runs in, and filling it from a checkpoint or with random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.config import EngineConfig, ModelConfig
from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.draft_head import DraftHead
from slipstream.models.mtp_head import is_mtp_tensor
from slipstream.models.registry import Architecture

# Checkpoints may carry these; the engine computes them itself.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", "rope_freqs.weight")


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
    slots = dict(model.slots())
    for name, tensor in _translated(model, tensors):
        slot = slots.pop(name, None)
        if slot is None:
            if name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and model.lm_head is None):
                continue
            if is_mtp_tensor(name, model.config.num_layers):
                continue  # they draft; who wants that reads them by itself
            raise ModelError(f"tensor '{name}' does not belong to {model.config.architecture}, or occurs twice")
        if slot.shape != tensor.shape:
            raise ModelError(f"tensor '{name}' has shape {list(tensor.shape)}, the config says {list(slot.shape)}")
        slot.copy_(tensor)
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
