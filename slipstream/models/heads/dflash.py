"""DFlash: decoder layers that draft a block in one pass, over keys made of the target's hidden states.

The states after a few of the target's layers are mixed by one product and normed. That is the context: every layer's
keys and values of a token come straight from it. A block is the newest token and masks, whose keys and values go
through the layers as usual. Its tokens see the context and each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from slipstream.attention.context import NORMED, AttentionContext
from slipstream.checkpoints.hf_config import read_architecture_name, require
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder, DecoderLayer
from slipstream.models.fused_layer import FusedLayers, fuse, prepare_attention, project_few
from slipstream.models.heads.network import BlockPlan, HeadNetwork, HeadPlan
from slipstream.models.heads.read_config import read_body
from slipstream.models.layers import Attention, Linear, RMSNorm
from slipstream.speculative_config import MAX_DRAFTS
from slipstream.values import describe_value

_OWN = "dflash_config"
_TAPS, _TAPS_AFTER = "target_layer_ids", "aux_hidden_state_layer_ids"  # of z-lab's files; of ``speculators`` files
_USUAL_BLOCK, _USUAL_BLOCK_OF_SPECULATORS = 16, 8
# Other networks of the same family. Ignoring one of these keys would only lower acceptance.
_VARIANTS = (
    "conv_kernel_size",
    "selector_rank",
    "markov_rank",
    "enable_confidence_head",
    "projector_type",
    "use_swa",
    "attention_sink_bias",
)
_FIXED: dict[str, Any] = {"is_neox_style": True, "attention_value_scale": 1.0, "use_aux_hidden_state": True}
# Names that some files have for the same tensors.
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def read(hf: Fields, target: ModelConfig) -> HeadPlan:
    own = hf.section(_OWN)
    _check_variant(hf, own)
    config, is_theirs = read_body(hf), _is_of_speculators(hf)
    key = "target_hidden_size" if hf.has("target_hidden_size") else "hidden_size"
    if (size := require(hf, key)) != target.hidden_size:
        raise ModelError(
            f"the head's config.json says '{key}' {size}, the target has {target.hidden_size}: it is for another target"
        )
    if config.hidden_size != target.hidden_size:
        raise ModelError(
            f"the head's layers have the size {config.hidden_size}, the target's {target.hidden_size}; a head that "
            "shares the target's embedding has its size"
        )
    layers = hf.get("num_target_layers")
    if layers is not None and layers != target.num_layers:
        raise ModelError(
            f"the head's config.json says 'num_target_layers' {describe_value(layers)}, the target has "
            f"{target.num_layers}: it is for another target"
        )
    vocab_size = hf.integer("draft_vocab_size", target.vocab_size, high=target.vocab_size)
    return HeadPlan(
        kind="dflash",
        config=replace(config, vocab_size=vocab_size, tie_embeddings=False),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        target_num_layers=target.num_layers,
        taps=_read_taps(hf, own, target.num_layers, config.num_layers),
        block=_read_block(hf, own, config, target, _USUAL_BLOCK_OF_SPECULATORS if is_theirs else _USUAL_BLOCK),
    )


def _is_of_speculators(hf: Fields) -> bool:
    return read_architecture_name(hf) == "DFlashSpeculator"


def _check_variant(hf: Fields, own: Fields) -> None:
    for fields in (hf, own):
        for key in _VARIANTS:
            if fields.get(key):
                raise ModelError(
                    f"'{fields.prefix}{key}' in the head's config.json is a variant of DFlash that is not supported"
                )
        for key, value in _FIXED.items():
            if fields.get(key) not in (None, value):
                raise ModelError(
                    f"'{fields.prefix}{key}' in the head's config.json is {describe_value(fields[key])}; only "
                    f"{value!r} is supported"
                )


def _read_taps(hf: Fields, own: Fields, num_layers: int, num_own_layers: int) -> tuple[int, ...]:
    """The number of layers before each tap, in the file's order."""
    if ids := own.integers(_TAPS, low=-1, high=num_layers - 1):
        # The index of the layer whose output is tapped. What follows the last one is tapped after the final norm.
        taps = [NORMED if idx == num_layers - 1 else idx + 1 for idx in ids]
    elif ids := hf.integers(_TAPS_AFTER, high=num_layers):
        taps = list(ids)
    elif _is_of_speculators(hf):
        taps = [2, num_layers // 2, num_layers - 3]
    elif num_own_layers == 1:
        taps = [num_layers // 2 + 1]
    else:  # evenly spaced, as many as the head has layers
        last = num_layers - 3
        taps = [1 + round(1 + i * (last - 1) / (num_own_layers - 1)) for i in range(num_own_layers)]
    if len({*taps}) != len(taps) or min(taps) < NORMED:
        raise ModelError(f"the head's config.json needs '{_TAPS}': different layers of the target, not {ids or taps}")
    return tuple(taps)


def _read_block(hf: Fields, own: Fields, config: ModelConfig, target: ModelConfig, usual: int) -> BlockPlan:
    size = own.integer("block_size", hf.integer("block_size", usual), low=1, high=256)
    mask_id = own if own.has("mask_token_id") else hf
    is_causal = tuple(_is_causal(hf, own, bool(config.window(idx))) for idx in range(config.num_layers))
    if any(config.window(idx) and not causal for idx, causal in enumerate(is_causal)):
        raise ModelError("the head has layers with a window whose attention is not causal, which is not supported")
    softcap = hf.number("final_logit_softcapping", 0.0, low=0.0)
    block = BlockPlan(
        size,
        mask_id.integer("mask_token_id", low=0, high=target.vocab_size - 1),
        is_causal,
        hf.flag("sample_from_anchor", own.flag("sample_from_anchor")),
        hf.number("output_multiplier", hf.number("logit_scale", 1.0)),
        softcap or None,
        hf.number("input_embedding_scale", 1.0),
    )
    if block.max_drafts < 1:
        raise ModelError(f"the head's config.json says 'block_size' {size}: no place is left for a draft")
    return block._replace(size=min(size, MAX_DRAFTS + (not block.samples_anchor)))


def _is_causal(hf: Fields, own: Fields, has_window: bool) -> bool:
    for fields, key in ((hf, "is_causal"), (own, "is_causal"), (own, "causal")):
        if fields.has(key):
            return fields.flag(key)
    return has_window and not hf.flag("sliding_window_non_causal")


class DFlashHead(HeadNetwork):
    def __init__(self, plan: HeadPlan, target: Decoder, max_position: int) -> None:
        super().__init__(plan, target)
        assert plan.block is not None
        self.block = plan.block
        config, eps = plan.config, plan.config.rms_norm_eps
        self.fc = Linear(len(plan.taps) * plan.target_hidden_size, {"fc": config.hidden_size})
        self.hints["fc.weight"] = f": {len(plan.taps)} taps ('{_TAPS}') of the target's size {plan.target_hidden_size}"
        self.hidden_norm, self.norm = RMSNorm(config.hidden_size, eps), RMSNorm(config.hidden_size, eps)
        self.layers = nn.ModuleList(DecoderLayer(config, idx) for idx in range(config.num_layers))
        self.cos_sin = self.rope_tables(max_position)
        self._fused: FusedLayers | None = None

    def rename(self, name: str) -> str:
        name = super().rename(name)
        theirs = next((prefix for prefix in _RENAMED if name.startswith(prefix)), "")
        return _RENAMED.get(theirs, "") + name.removeprefix(theirs)

    def finish_weights(self, device: torch.device | None = None) -> None:
        super().finish_weights(device)
        if len({*self.block.is_causal}) == 1:
            self._fused = fuse(self.layers)

    def _runs_few(self, num_tokens: int) -> bool:
        return self._fused is not None and num_tokens <= self._fused.max_tokens

    def write_context(self, features: Tensor, context: AttentionContext) -> Tensor:
        """Store every layer's keys and values of these tokens: [n, taps * hidden of the target] -> [n, hidden]."""
        few = self._runs_few(features.shape[0])
        mixed: Tensor = self.hidden_norm(project_few(self.fc, features) if few else self.fc(features))
        attentions = [cast(Attention, layer.self_attn) for layer in self.layers]
        if few:
            prepare_attention(context, attentions, self.cos_sin, mixed.dtype)
        for attention, cos_sin in zip(attentions, self.cos_sin, strict=True):
            attention.store(mixed, context, cos_sin, few)
        return mixed

    def forward(self, input_ids: Tensor, contexts: dict[bool, AttentionContext]) -> Tensor:
        """Of blocks of tokens, [n, hidden] after the final norm. ``contexts``: by whether attention is causal."""
        context = contexts[self.block.is_causal[0]]
        if self._fused is not None and self._runs_few(input_ids.shape[0]):
            normed: Tensor = self.norm(self._fused.forward_embedded(self._embed(input_ids), context, self.cos_sin))
            return normed
        hidden, residual = self._embed(input_ids), None
        for layer, cos_sin, is_causal in zip(self.layers, self.cos_sin, self.block.is_causal, strict=True):
            hidden, residual = layer(hidden, residual, contexts[is_causal], cos_sin)
        assert residual is not None
        return self.norm.add(hidden, residual)[0]

    def _embed(self, input_ids: Tensor) -> Tensor:
        """The table's own rows: what the target multiplies them with is its own matter."""
        embedding = self.borrowed.embedding if self.embed_tokens is None else self.embed_tokens
        rows, scale = embedding.matrix.look_up(input_ids), self.block.embedding_scale
        return rows if scale == 1.0 else rows * scale

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, draft_vocab], in float32 at least, from the output of ``forward``."""
        logits = self.project_logits(hidden)
        if self.block.logit_scale != 1.0:
            logits = logits * self.block.logit_scale
        if (cap := self.block.softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def build(plan: HeadPlan, target: Decoder, max_position: int) -> DFlashHead:
    return DFlashHead(plan, target, max_position)
