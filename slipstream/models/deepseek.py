"""DeepSeek-V2, V3, R1 and V3.2: multi-head latent attention, experts of which some are shared, dense layers first.

V3.2 has an indexer in every layer, which chooses the keys that a token attends to.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from slipstream.attention.mla import LatentSpec
from slipstream.attention.sparse_mla import SparseLatentSpec
from slipstream.checkpoints.hf_config import (
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_ROPE_FACTOR,
    read_decoder_config,
    read_experts,
    require,
)
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.experts_config import ExpertsConfig
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder, DecoderLayer
from slipstream.models.latent_attention import LatentAttention
from slipstream.models.sparse_attention import SparseLatentAttention
from slipstream.values import describe_value

_METHODS = ("greedy", "group_limited_greedy")


class DeepseekLayer(DecoderLayer):
    @classmethod
    def make_mixer(cls, config: ModelConfig, idx: int) -> nn.Module:
        is_sparse = isinstance(config.cache_specs[idx], SparseLatentSpec)
        return (SparseLatentAttention if is_sparse else LatentAttention)(config, idx)


class DeepseekV2(Decoder):
    layer_class = DeepseekLayer

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf)
        method = fields.text("topk_method", "greedy")
        if method not in _METHODS:
            raise ModelError(
                f"topk_method {describe_value(method)} in {fields.source} is not supported; "
                f"supported: {', '.join(_METHODS)}"
            )
        groups = _read_groups(fields) if method == _METHODS[1] else {}
        experts = _read_experts(fields, renormalise=fields.flag("norm_topk_prob"), **groups)
        return _read_config(fields, experts)


class DeepseekV3(Decoder):
    layer_class = DeepseekLayer

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        # Configs need not name the scoring, which is the same in all of them.
        fields = Fields.from_dict(hf)
        experts = _read_experts(
            fields,
            renormalise=fields.flag("norm_topk_prob", True),
            scoring="sigmoid",
            has_bias=True,
            group_score="top2",
            **_read_groups(fields),
        )
        return _read_config(fields, experts)


class DeepseekV32(DeepseekV3):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf)
        config = DeepseekV3.read_config(fields)
        dense = config.cache_specs[0]
        assert isinstance(dense, LatentSpec)
        if not dense.query_rank:
            raise ModelError(f"{fields.source} has no q_lora_rank, of which the indexer's queries are made")
        spec = SparseLatentSpec(
            **asdict(dense),
            index_heads=fields.integer("index_n_heads", 64, high=MAX_HEADS),
            index_dim=fields.integer("index_head_dim", 128, high=MAX_HEADS),
            top_k=fields.integer("index_topk", 2048),
        )
        if spec.index_dim < spec.rope_dim:
            raise ModelError(f"{fields.source} rotates {spec.rope_dim} of the indexer's {spec.index_dim} dimensions")
        return replace(config, layer_caches=(spec,) * config.num_layers)


def _read_groups(fields: Fields) -> dict[str, int]:
    return {"num_groups": require(fields, "n_group", 1), "num_kept_groups": require(fields, "topk_group", 1)}


def _read_experts(fields: Fields, **routing: Any) -> ExpertsConfig | None:
    if not fields.integer("n_routed_experts", 0, low=0):
        return None
    first = fields.integer("first_k_dense_replace", 0, low=0, high=MAX_LAYERS)
    step = fields.integer("moe_layer_freq", 1, low=1, high=MAX_LAYERS)
    layer_ids = [idx for idx in range(first, require(fields, "num_hidden_layers")) if idx % step == 0]
    if not layer_ids:
        return None
    size, num_shared = require(fields, "moe_intermediate_size"), fields.integer("n_shared_experts", 0, low=0, high=1024)
    scale = fields.number("routed_scaling_factor", 1.0, above=0.0, high=1e6)
    return read_experts(fields, size, layer_ids, size * num_shared, scale=scale, wide_logits=True, **routing)


def _read_config(fields: Fields, experts: ExpertsConfig | None) -> ModelConfig:
    rope_dim = fields.integer("qk_rope_head_dim", 64, high=MAX_HEADS)
    if rope_dim % 2:
        raise ModelError(f"{fields.source} rotates {rope_dim} dimensions of a head; an even number is needed")
    # Positions turn this part of a head and nothing else.
    fields = fields.changed(head_dim=rope_dim, num_key_value_heads=None, partial_rotary_factor=None)
    bias, query_rank = fields.flag("attention_bias"), _read_query_rank(fields)
    if bias and not query_rank:
        raise ModelError(f"{fields.source} has attention_bias without q_lora_rank, which is not supported")
    config = read_decoder_config(fields, experts=experts, qkv_bias=bias, output_bias=bias)
    spec = LatentSpec(
        num_heads=config.num_heads,
        latent_dim=fields.integer("kv_lora_rank", 512, high=MAX_HIDDEN),
        rope_dim=rope_dim,
        nope_dim=fields.integer("qk_nope_head_dim", 128, high=MAX_HEADS),
        value_dim=fields.integer("v_head_dim", 128, high=MAX_HEADS),
        query_rank=query_rank,
        interleaved=fields.flag("rope_interleave", True),
    )
    scale = _read_scale(fields, spec.nope_dim + spec.rope_dim)
    return replace(config, layer_caches=(spec,) * config.num_layers, attention_scale=scale)


def _read_query_rank(fields: Fields) -> int:
    return fields.integer("q_lora_rank", high=MAX_HIDDEN) if fields.has("q_lora_rank") else 0


def _read_scale(fields: Fields, head_dim: int) -> float:
    """Of the scores: by the size of a whole head, and sharper where yarn extends the context."""
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    scale: float = head_dim**-0.5
    if not scaling or (scaling.get("rope_type") or scaling.get("type") or "default") == "default":
        return scale
    sharper = scaling.number("mscale_all_dim", 0.0, low=0.0, high=MAX_ROPE_FACTOR)
    factor = scaling.number("factor", 1.0, above=0.0, high=MAX_ROPE_FACTOR)
    if factor > 1.0:
        scale *= (0.1 * sharper * math.log(factor) + 1) ** 2
    return scale
