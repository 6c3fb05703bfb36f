"""Arrival times of an open loop: random with a given rate, or from a trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError
from slipstream.load.workload import Asked, TraceEntry, find_prompt, positive, read_lines

# Field names that traces use.
_PROMPT_LENS = ("input_length", "prompt_len", "prompt_length", "prompt_tokens")
_OUTPUT_LENS = ("output_length", "output_len", "max_tokens", "completion_tokens")


def draw_arrivals(rate: float, burstiness: float, count: int, seed: int) -> NDArray[np.float64]:
    """Seconds after the start of ``count`` requests; all at once at an infinite rate.

    Gaps are gamma-distributed with the mean ``1 / rate`` and the shape ``burstiness``, as in vLLM: 1 is a Poisson
    process, less comes in bursts, more is more even.
    """
    if math.isinf(rate):
        return np.zeros(count)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    return np.cumsum(gaps)


def read_trace(path: Path, *, unit: str, speed: float, output_len: int) -> tuple[TraceEntry, ...]:
    """The entries sorted by time. Timestamps are in ms if ``unit`` says so, or is auto and they have ``hash_ids``."""
    entries = list(read_lines(path, "--trace"))
    in_ms = unit == "ms" or (unit == "auto" and any("hash_ids" in entry for entry, _ in entries))
    scale = (0.001 if in_ms else 1.0) / speed
    found = sorted((_entry(entry, location, output_len) for entry, location in entries), key=lambda entry: entry.at)
    first = found[0].at
    return tuple(entry._replace(at=(entry.at - first) * scale) for entry in found)


def _entry(entry: dict[str, Any], location: str, output_len: int) -> TraceEntry:
    at = entry.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
        raise ConfigError(f"{location}: timestamp must be a number, not {at!r}")
    max_tokens = _first(entry, _OUTPUT_LENS, location) or output_len
    prompt = find_prompt(entry, location)
    if prompt is not None:
        return TraceEntry(float(at), Asked(prompt, max_tokens))
    prompt_len = _first(entry, _PROMPT_LENS, location)
    if prompt_len is None:
        raise ConfigError(f"{location} has neither a prompt nor its length ({', '.join(_PROMPT_LENS)})")
    blocks = entry.get("hash_ids", ())
    if not isinstance(blocks, list | tuple) or not all(isinstance(block, int) for block in blocks):
        raise ConfigError(f"{location}: hash_ids must be a list of integers")
    return TraceEntry(float(at), None, prompt_len, max_tokens, tuple(blocks))


def _first(entry: dict[str, Any], names: tuple[str, ...], location: str) -> int | None:
    return next((positive(entry[name], name, location) for name in names if name in entry), None)
