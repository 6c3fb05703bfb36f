"""The type of the KV cache: the engine's dtype, or on request a smaller one."""

from __future__ import annotations

from slipstream.attention.choice import READS_SMALLER_KEYS
from slipstream.cache_spec import KeyValueType
from slipstream.config import CACHE_DTYPES
from slipstream.errors import ConfigError, nearest


def resolve_cache_dtype(asked: str, device: str, dtype: str, backend: str) -> KeyValueType:
    """A smaller type is supported only where kernels read it: float32 engines on a CPU."""
    if asked not in CACHE_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, not '{asked}'{nearest(asked, CACHE_DTYPES)}"
        )
    if asked in ("auto", dtype):
        return "model"
    if device != "cpu":
        raise ConfigError(f"kv_cache_dtype {asked} with dtype {dtype} needs device cpu, not {device}; use auto")
    if dtype != "float32" or asked == "float32":
        raise ConfigError(f"kv_cache_dtype {asked} needs dtype float32, not {dtype}; use auto")
    if backend not in READS_SMALLER_KEYS:
        raise ConfigError(
            f"kv_cache_dtype {asked} needs attention_backend {' or '.join(READS_SMALLER_KEYS)}, not {backend}"
        )
    return "float16" if asked == "float16" else "bfloat16"
