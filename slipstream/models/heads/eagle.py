"""EAGLE-1: one decoder layer over the token's embedding and the target's last hidden state, joined by ``fc``.

The state is the target's after its final norm, and the layer's output has the same form: the target's output matrix
computes logits of it, with no norm between.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.attention.context import AttentionContext
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder, DecoderLayer
from slipstream.models.fused_layer import fuse_parts, layer_parts, project_few
from slipstream.models.heads.draft_head import DraftHead
from slipstream.models.heads.network import HeadPlan
from slipstream.models.heads.read_config import check_variant, read_body, read_flag
from slipstream.models.layers import Attention, FeedForward, Layer, Linear, RMSNorm

_KNOWN = ("eagle_fc_bias", "parallel_draft_heads_num_layers")
_FIXED: dict[str, Any] = {
    "eagle_aux_hidden_state_layer_ids": [],
    "use_aux_hidden_state": False,
    "use_input_layernorm_in_first_layer": False,
    "use_last_layernorm": False,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}


def read(hf: Fields, target: ModelConfig) -> HeadPlan:
    check_variant(hf, _KNOWN, _FIXED)
    config = read_body(hf)
    for key, value in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if getattr(config, key) != value:
            raise ModelError(f"the head's config.json says '{key}' {getattr(config, key)}, the target has {value}")
    return HeadPlan(
        kind="eagle",
        config=replace(config, tie_embeddings=False),  # the output matrix is the target's
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        target_num_layers=target.num_layers,
        fc_bias=read_flag(hf, "eagle_fc_bias"),
    )


class FirstLayer(Layer):
    """A decoder layer without a norm before its attention, since its input comes from ``fc``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, 0)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, hidden: Tensor, context: AttentionContext, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        mixed, residual = self.post_attention_layernorm.add(self.self_attn(hidden, context, cos_sin), hidden)
        return self.mlp(mixed), residual


class EagleHead(DraftHead):
    def __init__(self, plan: HeadPlan, target: Decoder, max_position: int) -> None:
        super().__init__(plan, target)
        config = plan.config
        self.fc = Linear(2 * config.hidden_size, {"fc": config.hidden_size}, plan.fc_bias)
        self.hints["fc.weight"] = f": an embedding and a hidden state of the target's size {plan.target_hidden_size}"
        later = (DecoderLayer(config, idx) for idx in range(1, config.num_layers))
        self.layers = nn.ModuleList([FirstLayer(config), *later])
        self.cos_sin = self.rope_tables(max_position)

    def forward(self, module_idx: int, input_ids: Tensor, hidden: Tensor, context: AttentionContext) -> Tensor:
        cos_sin = self.cos_sin
        if (fused := self.fused_for(0, hidden)) is not None:
            fused.prepare(context, cos_sin, hidden.dtype)
        joined = self.join(input_ids, hidden, None)
        if fused is not None:
            x = project_few(self.fc, joined)
            return fused.forward_from(x, x, context, cos_sin)
        out, residual = self.layers[0](self.fc(joined), context, cos_sin[0])
        for layer, own_cos_sin in zip(self.layers[1:], cos_sin[1:], strict=True):
            out, residual = layer(out, residual, context, own_cos_sin)
        state: Tensor = out + residual
        return state

    def only_attention(self) -> Attention | None:
        first = self.layers[0]
        assert isinstance(first, FirstLayer)
        return first.self_attn if len(self.layers) == 1 else None

    def attended(self, input_ids: Tensor, hidden: Tensor, context: AttentionContext, few: bool) -> Tensor:
        joined = self.join(input_ids, hidden, None)
        mixed: Tensor = project_few(self.fc, joined) if few else self.fc(joined)
        return mixed

    def finish_weights(self, device: torch.device | None = None) -> None:
        super().finish_weights(device)
        parts = [layer_parts(layer, normed=idx > 0) for idx, layer in enumerate(self.layers)]
        self.fused = [fuse_parts(parts, self.fc)]

    def rename(self, name: str) -> str:
        # Names in the speculators library.
        for theirs, ours in (("fusion_fc.", "fc."), ("transformer.", "layers.0.")):
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        return super().rename(name)

    def optional(self) -> dict[str, Tensor]:
        # Published heads differ in the bias, often without saying so in their configs.
        bias = {"fc.bias": torch.empty(self.config.hidden_size, device="meta")} if self.fc.bias is None else {}
        return super().optional() | bias

    def adopt(self, name: str, file_name: str, tensor: Tensor) -> None:
        if name == "fc.bias":
            self.fc.bias = nn.Parameter(self.own_copy(tensor), requires_grad=False)
        else:
            super().adopt(name, file_name, tensor)


build = EagleHead
