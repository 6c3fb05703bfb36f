"""The shape of a model, whatever format its checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from slipstream.cache_spec import CacheSpec, GroupedQuerySpec, KeyValueType, page_bytes
from slipstream.encoder_config import EncoderConfig
from slipstream.experts_config import ExpertsConfig
from slipstream.source_encoder_config import SourceEncoderConfig


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, rotated size, and how the frequencies are scaled for long contexts."""

    theta: float = 10000.0
    rotary_dim: int = 0
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # Factor on rotated vectors, which sharpens attention over long contexts.
    attention_factor: float = 1.0
    # yarn: frequencies with more rotations than the first within the original context are kept, with fewer than the
    # second scaled.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # longrope: divisors of the frequencies, within the original context and beyond it.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # Divisors of each frequency as GGUF files store them, for any kind of scaling.
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, independent of the checkpoint's format."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of the scores; 1 / sqrt(head_dim) if unset
    windows: tuple[int, ...] = ()  # attention window of each layer, 0 for none; empty: no windows
    window_rope: RopeConfig | None = None  # of layers with a window, if it differs
    experts: ExpertsConfig | None = None
    attention_gate: bool = False  # whether the output of each head is multiplied by the sigmoid of a gate
    # The cache of each layer; empty: keys and values of grouped-query attention in all of them.
    layer_caches: tuple[CacheSpec, ...] = ()
    keys_in: KeyValueType = "model"  # the type of keys and values in the cache
    source_encoder: SourceEncoderConfig | None = None  # of an encoder-decoder
    encoder: EncoderConfig | None = None  # of a model that only encodes texts
    dtype: str = "float32"  # as stored in the checkpoint
    # The checkpoint's quantization_config; None: unquantised weights.
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)

    def window(self, layer_idx: int) -> int:
        return self.windows[layer_idx] if self.windows else 0

    def has_experts(self, layer_idx: int) -> bool:
        return self.experts is not None and layer_idx in self.experts.layer_ids

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """The cache of each layer."""
        return self.layer_caches or (self.keys_and_values,) * self.num_layers

    @property
    def keys_and_values(self) -> GroupedQuerySpec:
        """The cache of a layer with grouped-query attention."""
        return GroupedQuerySpec(self.num_kv_heads, self.head_dim, self.keys_in)

    def with_keys_in(self, dtype: KeyValueType) -> ModelConfig:
        """The same with keys and values of another type in the cache."""
        return replace(self, keys_in=dtype, layer_caches=tuple(spec.with_keys_in(dtype) for spec in self.layer_caches))

    @property
    def has_logits(self) -> bool:
        """Whether it generates text, or only encodes it."""
        return self.encoder is None

    @property
    def is_plain(self) -> bool:
        """Whether all layers have grouped-query attention without a gate on its output."""
        return set(self.cache_specs) == {self.keys_and_values} and not self.attention_gate

    @property
    def max_encoder_entries(self) -> int:
        """Of one request, kept in pages of their own."""
        return 0 if self.source_encoder is None else self.source_encoder.max_entries

    @property
    def num_attention_layers(self) -> int:
        """Layers with grouped-query attention."""
        return sum(isinstance(spec, GroupedQuerySpec) for spec in self.cache_specs)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Cache memory of a token in all layers."""
        return page_bytes(self.cache_specs, 1, dtype)
