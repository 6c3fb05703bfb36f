"""Schemes of weights by the name that a checkpoint's ``quantization_config`` gives them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.errors import ModelError, nearest
from slipstream.values import describe_value
from slipstream.weights.dense import Dense
from slipstream.weights.matrix import WeightScheme

METHOD = "quant_method"

ReadScheme = Callable[[Mapping[str, Any]], WeightScheme]
# Files are imported when their method is asked for.
_METHODS = {
    "gguf": ("slipstream.weights.gguf_blocks", "GGUFScheme"),
    "compressed-tensors": ("slipstream.weights.compressed_tensors", "CompressedTensors"),
    "gptq": ("slipstream.weights.gptq_awq", "read_gptq"),
    "awq": ("slipstream.weights.gptq_awq", "read_awq"),
    "fp8": ("slipstream.weights.fp8_blocks", "FP8Scheme"),
}
registered: dict[str, ReadScheme] = {}


def register(method: str, read: ReadScheme) -> None:
    """``read`` makes the scheme of a ``quantization_config``, or raises a ``ModelError``."""
    if method in _METHODS or registered.get(method, read) is not read:
        raise ValueError(f"two schemes of weights are called {method}")
    registered[method] = read


def scheme_of(quantization: Mapping[str, Any] | None) -> WeightScheme:
    """None: the checkpoint says nothing, so its weights are plain numbers."""
    if quantization is None:
        return Dense()
    method = quantization.get(METHOD)
    if isinstance(method, str) and method in _METHODS:
        module, name = _METHODS[method]
        read: ReadScheme = getattr(importlib.import_module(module), name)
        return read(quantization)
    if not isinstance(method, str) or method not in registered:
        known = (*_METHODS, *registered)
        raise ModelError(
            f"quantized weights of the kind {describe_value(method)} are not supported"
            f"{nearest(str(method), known)} (supported: {', '.join(known)})"
        )
    return registered[method](quantization)
