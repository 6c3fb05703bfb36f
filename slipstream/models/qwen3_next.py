"""Qwen3-Next and Qwen3.5: gated delta nets in three layers of four, gated attention in the fourth.

Qwen3.5's text models differ in how their checkpoints store a delta net's products; those without experts are dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.attention.gdn import DeltaNetSpec
from slipstream.cache_spec import CacheSpec, GroupedQuerySpec
from slipstream.checkpoints.hf_config import (
    MAX_LAYERS,
    read_decoder_config,
    read_expert_layers,
    read_experts,
    read_layer_types,
    require,
)
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.experts_config import ExpertsConfig
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder, DecoderLayer
from slipstream.models.delta_net import GatedDeltaNet, split_projection
from slipstream.weights.matrix import Slot

_KINDS = ("linear_attention", "full_attention")
# What configs may leave out, as published.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


class Qwen3NextLayer(DecoderLayer):
    @classmethod
    def make_mixer(cls, config: ModelConfig, idx: int) -> nn.Module:
        if _is_delta_net(config, idx):
            return GatedDeltaNet(config, idx)
        return super().make_mixer(config, idx)


class Qwen3Next(Decoder):
    layer_class = Qwen3NextLayer

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf).with_defaults(_DEFAULTS)
        bias, experts = fields.flag("attention_bias"), _experts(fields)
        if experts is not None:  # no layer may be dense
            fields = fields.with_defaults({"intermediate_size": experts.intermediate_size})
        config = read_decoder_config(
            fields, qk_norm=True, qkv_bias=bias, output_bias=bias, attention_gate=True, experts=experts
        )
        return replace(config, layer_caches=_layer_caches(fields, config.keys_and_values))

    def slots(self) -> Iterator[tuple[str, Slot]]:
        for name, slot in super().slots():
            parts = name.split(".")
            if parts[:2] == ["model", "layers"] and _is_delta_net(self.config, int(parts[2])):
                name = name.replace(".self_attn.", ".linear_attn.")
            yield name, slot

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        nets = [spec for spec in self.config.cache_specs if isinstance(spec, DeltaNetSpec)]
        if ".linear_attn." in name and nets:
            return split_projection(name, tensor, nets[0])
        if "norm" in name:
            # Checkpoints store the weight minus one. Adding one in 16 bits would round once too often.
            return [(name, tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + 1)]
        if ".self_attn.q_proj." in name:
            return self._split_gate(name, tensor)
        return super().translate(name, tensor)

    def _split_gate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Separate each head's queries from its gate, which follows them in the checkpoint."""
        heads, head_dim = self.config.num_heads, self.config.head_dim
        num_rows = tensor.shape[0] if tensor.ndim else 0
        if num_rows != 2 * heads * head_dim:
            raise ModelError(
                f"tensor '{name}' has {num_rows} rows, the config says {2 * heads * head_dim}: "
                f"{heads} heads of {head_dim}, each with a gate"
            )
        by_head = tensor.view(heads, 2, head_dim, *tensor.shape[1:])
        q, gate = (part.flatten(0, 1) for part in by_head.unbind(1))
        return [(name, q), (name.replace(".q_proj.", ".q_proj_gate."), gate)]


def _is_delta_net(config: ModelConfig, layer_idx: int) -> bool:
    return isinstance(config.cache_specs[layer_idx], DeltaNetSpec)


def _layer_caches(fields: Fields, attention: GroupedQuerySpec) -> tuple[CacheSpec, ...]:
    """The cache of each layer; empty where all have attention."""
    if fields.has("layer_types"):
        kinds = read_layer_types(fields, _KINDS)
    else:
        every = fields.integer("full_attention_interval", 4, high=MAX_LAYERS)
        kinds = [_KINDS[(idx + 1) % every == 0] for idx in range(require(fields, "num_hidden_layers"))]
    if _KINDS[1] not in kinds:
        raise ModelError(f"{fields.source}'s layer_types name no layer with full_attention, which is not supported")
    num_k_heads, num_v_heads = require(fields, "linear_num_key_heads"), require(fields, "linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise ModelError(f"{fields.source} has {num_v_heads} value heads for {num_k_heads} key heads of a delta net")
    if _KINDS[0] not in kinds:
        return ()
    dims = (require(fields, "linear_key_head_dim"), require(fields, "linear_value_head_dim"))
    net = DeltaNetSpec(num_k_heads, num_v_heads, *dims, require(fields, "linear_conv_kernel_dim"))
    return tuple(net if kind == _KINDS[0] else attention for kind in kinds)


def _experts(fields: Fields) -> ExpertsConfig | None:
    if not fields.integer("num_experts", 0, low=0):
        return None
    layer_ids = read_expert_layers(fields)
    if not layer_ids:
        return None
    renormalise = fields.flag("norm_topk_prob", True)
    shared = require(fields, "shared_expert_intermediate_size")
    size = require(fields, "moe_intermediate_size")
    return read_experts(fields, size, layer_ids, shared, shared_gate=True, renormalise=renormalise)
