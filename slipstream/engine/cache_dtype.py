"""Which type keys and values are kept in: the engine's, or by choice a smaller one."""

from __future__ import annotations

from slipstream.attention.choice import READS_SMALLER_KEYS
from slipstream.cache_spec import KeyValueType
from slipstream.config import CACHE_DTYPES
from slipstream.errors import ConfigError, nearest


def resolve_cache_dtype(wish: str, device: str, dtype: str, backend: str) -> KeyValueType:
    """Refuses what no kernel reads: a smaller type is for engines that compute in float32 on a CPU."""
    if wish not in CACHE_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, not '{wish}'{nearest(wish, CACHE_DTYPES)}"
        )
    if wish in ("auto", dtype):
        return "model"
    if device != "cpu":
        raise ConfigError(f"kv_cache_dtype {wish} with dtype {dtype} needs device cpu, not {device}; use auto")
    if dtype != "float32" or wish == "float32":
        raise ConfigError(f"kv_cache_dtype {wish} needs dtype float32, not {dtype}; use auto")
    if backend not in READS_SMALLER_KEYS:
        raise ConfigError(
            f"kv_cache_dtype {wish} needs attention_backend {' or '.join(READS_SMALLER_KEYS)}, not {backend}"
        )
    return "float16" if wish == "float16" else "bfloat16"
