"""EAGLE-3: a decoder layer over the token's embedding and a mix of hidden states from several depths of the target.

The mix (``fc``) is computed once, from the target; in later passes the layer's own output replaces it. The layer
normalises embedding and state separately and attends from their concatenation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from slipstream.attention.context import AttentionContext
from slipstream.attention.grouped_query import GroupedQueryStep
from slipstream.checkpoints.hf_config import require
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.kernels.native.decoder_stack import DecoderStack, StackInput, decoder_stack
from slipstream.models.cpu_stack import stack_of
from slipstream.models.decoder import Decoder, DecoderLayer
from slipstream.models.fused_layer import fuse_parts, layer_parts, project_few
from slipstream.models.heads.draft_head import DraftHead
from slipstream.models.heads.network import HeadPlan
from slipstream.models.heads.read_config import check_variant, read_body, read_flag
from slipstream.models.layers import Attention, FeedForward, Layer, Linear, RMSNorm
from slipstream.values import describe_value

_TAPS = "eagle_aux_hidden_state_layer_ids"
_KNOWN = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "draft_vocab_size",
    "use_aux_hidden_state",
    "num_aux_hidden_states",
    "parallel_draft_heads_num_layers",
    _TAPS,
)
_FIXED = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}


def read(hf: Fields, target: ModelConfig) -> HeadPlan:
    check_variant(hf, _KNOWN, _FIXED)
    config = read_body(hf)
    _check_hidden_size(hf, config, target)
    key = "draft_vocab_size" if hf.get("draft_vocab_size") is not None else "vocab_size"
    draft_vocab_size = require(hf, key)
    if draft_vocab_size > target.vocab_size:
        raise ModelError(
            f"the head's config.json says '{key}' {draft_vocab_size}, more than the target's {target.vocab_size} tokens"
        )
    taps = _read_taps(hf, target.num_layers) if read_flag(hf, "use_aux_hidden_state", True) else ()
    count = hf.get("num_aux_hidden_states")
    if count is not None and count != len(taps):
        raise ModelError(
            f"the head's config.json says 'num_aux_hidden_states' {describe_value(count)}, but '{_TAPS}' means "
            f"{len(taps)} layers"
        )
    return HeadPlan(
        kind="eagle3",
        config=replace(config, vocab_size=draft_vocab_size),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        target_num_layers=target.num_layers,
        taps=taps,
        norm_before_residual=read_flag(hf, "norm_before_residual"),
        norm_before_fc=read_flag(hf, "norm_before_fc"),
        fc_norm=read_flag(hf, "fc_norm"),
        norm_output=read_flag(hf, "norm_output"),
    )


def _check_hidden_size(hf: Fields, config: ModelConfig, target: ModelConfig) -> None:
    if hf.get("target_hidden_size") is None:
        key, size = "hidden_size", config.hidden_size
    else:
        key, size = "target_hidden_size", require(hf, "target_hidden_size")
    if size != target.hidden_size:
        raise ModelError(
            f"the head's config.json says '{key}' {size}, the target has {target.hidden_size}: it is for another target"
        )


def _read_taps(hf: Fields, num_layers: int) -> tuple[int, ...]:
    """The number of layers before each tap of the target. Every engine concatenates taps in the order of layers."""
    ids = hf.get(_TAPS) or (hf.get("eagle_config") or {}).get(_TAPS)
    if not ids:
        ids = [2, num_layers // 2, num_layers - 3]
        if len({*ids}) != 3 or min(ids) < 0:
            raise ModelError(f"the head's config.json needs '{_TAPS}' for a target of only {num_layers} layers")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids) or len({*ids}) != len(ids):
        raise ModelError(
            f"'{_TAPS}' in the head's config.json must be different numbers of layers, not {describe_value(ids)}"
        )
    # SpecForge and SGLang give the index of the layer whose output is tapped. Only they write 1 for the first tap.
    shift = 1 if ids[0] == 1 else 0
    taps = tuple(sorted(i + shift for i in ids))
    if taps[-1] > num_layers:
        raise ModelError(
            f"'{_TAPS}' in the head's config.json taps the target after {taps[-1]} layers, but it has {num_layers}"
        )
    return taps


class WideAttention(Attention):
    """Attention over the concatenation of an embedding and a state."""

    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__(config, idx)
        self.qkv_proj = Linear(2 * config.hidden_size, dict(self.qkv_proj.shape.parts), config.qkv_bias)


class FirstLayer(Layer):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = WideAttention(config, 0)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = FeedForward(config)

    def forward(
        self, joined: Tensor, residual: Tensor, context: AttentionContext, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        mixed, residual = self.post_attention_layernorm.add(self.self_attn(joined, context, cos_sin), residual)
        return self.mlp(mixed), residual


class Eagle3Head(DraftHead):
    def __init__(self, plan: HeadPlan, target: Decoder, max_position: int) -> None:
        super().__init__(plan, target)
        config, eps = plan.config, plan.config.rms_norm_eps
        num_features = max(1, len(plan.taps))
        width = num_features * plan.target_hidden_size
        # A head without taps uses the target's hidden state directly if the size is right.
        mixes = bool(plan.taps) or plan.target_hidden_size != config.hidden_size
        self.fc = Linear(width, {"fc": config.hidden_size}) if mixes else None
        self.hints["fc.weight"] = f": {num_features} taps ('{_TAPS}') of the target's size {plan.target_hidden_size}"
        self.input_norm = RMSNorm(width, eps) if plan.norm_before_fc else None
        norms = [RMSNorm(plan.target_hidden_size, eps) for _ in range(num_features if plan.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms)
        later = (DecoderLayer(config, idx) for idx in range(1, config.num_layers))
        self.layers = nn.ModuleList([FirstLayer(config), *later])
        self.norm = RMSNorm(config.hidden_size, eps)
        self.cos_sin = self.rope_tables(max_position)
        self.stack: DecoderStack | None = None  # all layers as one operation, where possible

    def combine(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            taps = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        if self.fc is None:
            return features
        few = self.fused_for(0, features) is not None
        mixed: Tensor = project_few(self.fc, features) if few else self.fc(features)
        return mixed

    def forward(self, module_idx: int, input_ids: Tensor, hidden: Tensor, context: AttentionContext) -> Tensor:
        first, cos_sin, normed = self.layers[0], self.cos_sin, self.plan.norm_output
        assert isinstance(first, FirstLayer)
        if (fused := self.fused_for(0, hidden)) is not None:
            fused.prepare(context, cos_sin, hidden.dtype)
        joined = self.join(input_ids, hidden, (first.input_layernorm, first.hidden_norm))
        residual = joined[:, hidden.shape[1] :] if self.plan.norm_before_residual else hidden
        if fused is not None:
            state: Tensor = fused.forward_from(joined, residual, context, cos_sin)
            return self.norm(state) if normed else state
        step = cast(GroupedQueryStep, context.group_steps[0])
        if self.stack is not None and (common := step.in_place()) is not None:
            arrays = (step.caches.in_order, step.places.of(cos_sin[0], hidden.dtype), common.requests)
            out, residual = decoder_stack(StackInput(residual, residual, joined), self.stack, *arrays)
            return self._finish(out, residual) if normed else out.add_(residual)
        out, residual = first(joined, residual, context, cos_sin[0])
        for layer, own_cos_sin in zip(self.layers[1:], cos_sin[1:], strict=True):
            out, residual = layer(out, residual, context, own_cos_sin)
        return self._finish(out, residual)

    def _finish(self, out: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.norm.add(out, residual)[0] if self.plan.norm_output else out + residual
        return normed

    def only_attention(self) -> Attention | None:
        first = self.layers[0]
        assert isinstance(first, FirstLayer)
        return first.self_attn if len(self.layers) == 1 else None

    def attended(self, input_ids: Tensor, hidden: Tensor, context: AttentionContext, few: bool) -> Tensor:
        first = self.layers[0]
        assert isinstance(first, FirstLayer)
        return self.join(input_ids, hidden, (first.input_layernorm, first.hidden_norm))

    def finish_weights(self, device: torch.device | None = None) -> None:
        super().finish_weights(device)
        parts = [layer_parts(layer, normed=idx > 0) for idx, layer in enumerate(self.layers)]
        self.fused = [fuse_parts(parts)]
        self.stack = stack_of(self.config, self.layers) if self.config.is_plain else None

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.project_logits(hidden if self.plan.norm_output else self.norm(hidden))


build = Eagle3Head
