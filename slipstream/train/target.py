"""The target model in training: a forward pass over a batch of whole texts that returns its hidden states.

Uses the engine's model and attention, so that a head is trained on the numbers it will get when drafting.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionBackend
from slipstream.attention.backends.cpu import CpuBackend
from slipstream.attention.backends.triton import TritonBackend
from slipstream.attention.context import StepTokens
from slipstream.attention.grouped_query import serve_layers
from slipstream.attention.groups import CacheSizes, allocate
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.config import EngineOptions, ModelConfig
from slipstream.engine.build import plan_engine
from slipstream.models.decoder import Decoder, DecoderLayer
from slipstream.models.load import build_model, load_weights

_PAGE = 16  # tokens; texts are padded to whole pages
_MAX_TOKENS = 16384  # in one pass
_CHUNK = 4096  # positions whose logits over the whole vocabulary are computed at a time


class HiddenStates(NamedTuple):
    """The target's states for a batch."""

    features: Tensor  # [rows, length, taps * hidden]: the residual stream after the tapped layers, concatenated
    normed: Tensor  # [rows, length, hidden]: after the final norm, the input of the logits


class TargetModel:
    def __init__(self, model: Decoder, taps: tuple[int, ...], backend: AttentionBackend | None = None) -> None:
        self.model, self._taps = model, taps
        self.device, self.dtype = model.device, model.model.norm.weight.dtype
        self._backend = backend or (TritonBackend() if self.device.type == "cuda" else CpuBackend(_PAGE))
        self._cache = torch.empty(0)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def embedding(self) -> Tensor:
        """[vocab, hidden]"""
        return self.model.model.embed_tokens.weight.detach()

    @property
    def head(self) -> Tensor:
        """[vocab, hidden]: the weight of its logits."""
        return self.model.output.dequantised()

    @property
    def bytes_per_token(self) -> int:
        """Memory of the hidden states."""
        return (len(self._taps) + 1) * self.config.hidden_size * self.dtype.itemsize

    @property
    def last_layer(self) -> dict[str, Tensor]:
        """Weights of the last layer by name, without biases; empty if it is not a plain Llama layer."""
        config, idx = self.config, self.config.num_layers - 1
        if self.model.layer_class is not DecoderLayer or config.has_experts(idx) or config.activation != "silu":
            return {}
        prefix = f"model.layers.{idx}."
        own = ((name, slot) for name, slot in self.model.slots() if name.startswith(prefix))
        slots = {name.removeprefix(prefix): slot for name, slot in own if isinstance(slot, Tensor)}
        left_out = ("bias", "q_norm.weight", "k_norm.weight")
        return {name: slot.detach() for name, slot in slots.items() if not name.endswith(left_out)}

    @torch.no_grad()
    def read(self, token_ids: Tensor) -> HiddenStates:  # [rows, length] int32, length a multiple of 16
        size, device = self.config.hidden_size, self.device
        features = torch.empty(*token_ids.shape, len(self._taps) * size, dtype=self.dtype, device=device)
        normed = torch.empty(*token_ids.shape, size, dtype=self.dtype, device=device)
        at_once = max(1, _MAX_TOKENS // token_ids.shape[1])
        for begin in range(0, token_ids.shape[0], at_once):
            part = slice(begin, begin + at_once)
            normed[part] = self._read(token_ids[part], features[part].flatten(0, 1)).view_as(normed[part])
        return HiddenStates(features, normed)

    def _read(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """The input of the logits; the tapped states go to ``features`` [rows * length, taps * hidden]."""
        (rows, length), device = token_ids.shape, self.device
        parts = torch.split(features, self.config.hidden_size, dim=1)
        common = self._metadata(rows, length)
        # Padding to whole pages may exceed the last position.
        positions = torch.arange(length, device=device).clamp_(max=self.model.cos_sin[0].shape[0] - 1).repeat(rows)
        caches = serve_layers(self._backend, self._caches(rows * length))
        taps = dict(zip(self._taps, parts, strict=True))
        context = caches.begin(StepTokens(positions, common.slot_mapping, common), taps)
        return self.model.forward(token_ids.to(device, torch.int32).flatten(), context)

    @torch.no_grad()
    def greedy(self, normed: Tensor) -> Tensor:  # [n, hidden] -> [n] int64
        """The target's greedy token at each position."""
        chunks = [self.model.compute_logits(chunk).argmax(dim=-1) for chunk in torch.split(normed, _CHUNK)]
        return torch.cat(chunks) if chunks else normed.new_empty(0, dtype=torch.int64)

    def _metadata(self, rows: int, length: int) -> CommonAttentionMetadata:
        """Every row is a request that has all its tokens in this step, on its own pages."""
        device, pages = self.device, length // _PAGE
        starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        return CommonAttentionMetadata(
            num_reqs=rows,
            num_actual_tokens=rows * length,
            max_query_len=length,
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts.numpy(),
            query_lens=lengths,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=np.full(rows, length, np.int32),
            # Page 0 is the null page.
            block_table=torch.arange(1, rows * pages + 1, dtype=torch.int32, device=device).view(rows, pages),
            slot_mapping=torch.arange(_PAGE, _PAGE + rows * length, device=device),
            num_computed_cpu=np.zeros(rows, np.int32),
        )

    def _caches(self, num_tokens: int) -> list[Tensor]:
        """One cache for all layers: each writes all keys of the batch before it attends, and none reads them later."""
        num_pages = 1 + num_tokens // _PAGE
        if self._cache.shape[0] <= num_pages:
            sizes = CacheSizes(num_pages, _PAGE, 0, 0, str(self.dtype).removeprefix("torch."))
            (self._cache,) = allocate(self.config.keys_and_values, sizes, self.device)
        return [self._cache] * self.config.num_layers


def load_target(path: Path, checkpoint: Checkpoint, taps: tuple[int, ...], device: str, dtype: str) -> TargetModel:
    """The target with its weights as in an engine with default options."""
    options = EngineOptions(model=str(path), device=device, dtype=dtype, num_gpu_blocks_override=1)
    plan = plan_engine(options, checkpoint.config)
    model = build_model(plan.architecture, plan.config, plan.device.torch_device)
    load_weights(model, checkpoint.tensors())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return TargetModel(model, taps)


def padded_length(length: int) -> int:
    return -(-length // _PAGE) * _PAGE
