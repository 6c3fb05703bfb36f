"""Qwen3-Next and Qwen3.5: gated delta nets in three layers of four, gated attention in the fourth.

Qwen3.5's text models differ in how their checkpoints store a delta net's products; those without experts are dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.config import DeltaNetConfig, ExpertsConfig, ModelConfig
from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.delta_net import split_projection
from slipstream.models.hf_config import read_decoder_config, read_experts, require

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


class Qwen3Next(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        hf = {**_DEFAULTS, **hf}
        bias, experts = bool(hf.get("attention_bias", False)), _experts(hf)
        if experts is not None:
            hf.setdefault("intermediate_size", experts.intermediate_size)  # no layer may be dense
        return read_decoder_config(
            hf,
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            attention_gate=True,
            delta_net=_delta_net(hf),
            experts=experts,
        )

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        for name, slot in super().slots():
            yield (name.replace(".self_attn.", ".linear_attn.") if self._is_recurrent(name) else name), slot

    def _is_recurrent(self, name: str) -> bool:
        parts = name.split(".")
        return parts[:2] == ["model", "layers"] and self.config.is_recurrent(int(parts[2]))

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if ".linear_attn." in name:
            assert self.config.delta_net is not None
            return split_projection(name, tensor, self.config.delta_net)
        if "norm" in name:
            # Checkpoints store how far a weight is from one. In 16 bits the sum would be rounded once too often.
            return [(name, tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + 1)]
        if ".self_attn.q_proj." in name:
            return self._split_gate(name, tensor)
        return super().translate(name, tensor)

    def _split_gate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A head's queries and its gate stand one behind the other."""
        heads, head_dim = self.config.num_heads, self.config.head_dim
        if tensor.shape[0] != 2 * heads * head_dim:
            raise ModelError(
                f"tensor '{name}' has {tensor.shape[0]} rows, the config says {2 * heads * head_dim}: "
                f"{heads} heads of {head_dim}, each with a gate"
            )
        by_head = tensor.view(heads, 2, head_dim, *tensor.shape[1:])
        q, gate = (part.flatten(0, 1) for part in by_head.unbind(1))
        return [(name, q), (name.replace(".q_proj.", ".q_proj_gate."), gate)]


def _delta_net(hf: dict[str, Any]) -> DeltaNetConfig | None:
    num_layers, every = require(hf, "num_hidden_layers"), hf.get("full_attention_interval") or 4
    kinds = hf.get("layer_types") or [_KINDS[(idx + 1) % every == 0] for idx in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise ModelError(f"config.json's layer_types must name {' or '.join(_KINDS)} for each of {num_layers} layers")
    if _KINDS[1] not in kinds:
        raise ModelError("config.json's layer_types name no layer with full_attention, which is not supported")
    num_k_heads, num_v_heads = require(hf, "linear_num_key_heads"), require(hf, "linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise ModelError(f"config.json has {num_v_heads} value heads for {num_k_heads} key heads of a delta net")
    layer_ids = tuple(idx for idx, kind in enumerate(kinds) if kind == _KINDS[0])
    if not layer_ids:
        return None
    dims = (require(hf, "linear_key_head_dim"), require(hf, "linear_value_head_dim"))
    return DeltaNetConfig(num_k_heads, num_v_heads, *dims, require(hf, "linear_conv_kernel_dim"), layer_ids)


def _experts(hf: dict[str, Any]) -> ExpertsConfig | None:
    if not hf.get("num_experts"):
        return None
    step, dense = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or ()
    layer_ids = [i for i in range(require(hf, "num_hidden_layers")) if i not in dense and (i + 1) % step == 0]
    if not layer_ids:
        return None
    renormalise = bool(hf.get("norm_topk_prob", True))
    shared = require(hf, "shared_expert_intermediate_size")
    return read_experts(hf, require(hf, "moe_intermediate_size"), renormalise, layer_ids, shared)
