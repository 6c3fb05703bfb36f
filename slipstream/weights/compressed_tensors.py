"""Checkpoints of the compressed-tensors library: int4 weights packed into int32, and int8 weights.

``targets`` and ``ignore`` name what is quantised. Weights with another strategy or type are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.values import describe_value
from slipstream.weights.dense import Dense
from slipstream.weights.integers import Codes, IntegerFormat, unpack_nibbles
from slipstream.weights.matrix import WeightFormat

METHOD = "compressed-tensors"
_PACKED, _PLAIN = "pack-quantized", "int-quantized"


class CompressedIntegers:
    """``pack-quantized``: nibble i of a number is input 8 * j + i, stored plus 8. ``int-quantized``: a byte each."""

    def __init__(self, bits: int, group: int | None, symmetric: bool, packed: bool) -> None:
        self.bits, self._group, self._symmetric, self._packed = bits, group, symmetric, packed

    def group_size(self, in_size: int) -> int:
        return self._group or in_size

    def expect(self, num_rows: int, in_size: int) -> Mapping[str, Tensor]:
        num_groups = -(-in_size // self.group_size(in_size))
        found = {"weight_scale": torch.empty(num_rows, num_groups)}
        if not self._packed:
            return {"weight": torch.empty(num_rows, in_size, dtype=torch.int8), **found}
        per_number = 32 // self.bits
        found |= {
            "weight_packed": torch.empty(num_rows, -(-in_size // per_number), dtype=torch.int32),
            "weight_shape": torch.empty(2, dtype=torch.int64),
        }
        if not self._symmetric:
            found["weight_zero_point"] = torch.empty(-(-num_rows // per_number), num_groups, dtype=torch.int32)
        return found

    def read(self, tensors: Mapping[str, Tensor], in_size: int) -> Codes:
        scales = tensors["weight_scale"]
        if not self._packed:
            codes = (tensors["weight"].to(torch.int16) + 128).to(torch.uint8)
            return Codes(codes, scales, None, 8)
        codes = self._unpack(tensors["weight_packed"])[:, :in_size]
        zeros = None
        if (packed := tensors.get("weight_zero_point")) is not None:
            zeros = self._unpack(packed.T.contiguous())[:, : codes.shape[0]].T.contiguous()
        return Codes(codes, scales, zeros, self.bits)

    def _unpack(self, packed: Tensor) -> Tensor:
        return unpack_nibbles(packed) if self.bits == 4 else packed.contiguous().view(torch.uint8)


class CompressedTensors:
    """One group of settings for all quantised weights; checkpoints with several groups are refused."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        groups = quantization.get("config_groups")
        if not isinstance(groups, Mapping) or len(groups) != 1:
            raise ModelError(f"{METHOD} with config_groups {describe_value(groups)} is not supported; one group is")
        (group,) = groups.values()
        weights, form = group.get("weights"), group.get("format") or quantization.get("format")
        if form not in (_PACKED, _PLAIN) or not isinstance(weights, Mapping):
            raise ModelError(
                f"{METHOD} of the format {describe_value(form)} is not supported (supported: {_PACKED}, {_PLAIN})"
            )
        ignore = quantization.get("ignore") or []
        if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
            raise ModelError(f"'ignore' of {METHOD} must be a list of names, not {describe_value(ignore)}")
        self._ignore = tuple(ignore)
        self._format = IntegerFormat(METHOD, _read_layout(weights, packed=form == _PACKED))

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        ignored = [self._is_ignored(name) for name in names]
        if all(ignored):
            return Dense()
        if any(ignored):
            raise ModelError(f"{METHOD} ignores a part of {', '.join(names)}, which are one product; not supported")
        return self._format

    def format_of_table(self, name: str) -> WeightFormat:
        return Dense()

    def _is_ignored(self, name: str) -> bool:
        for entry in self._ignore:
            pattern, _, expression = entry.partition("re:")
            if (not pattern and re.match(expression, name)) or entry == name:
                return True
        return False


def _read_layout(weights: Mapping[str, Any], packed: bool) -> CompressedIntegers:
    bits, strategy, group = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    said = f"{bits} bits, type {weights.get('type')}, strategy {strategy}, group_size {group}"
    is_known = weights.get("type") == "int" and type(bits) is int and bits in ((4, 8) if packed else (8,))
    has_groups = strategy == "group" and type(group) is int and group > 0
    symmetric = weights.get("symmetric", True)
    if not is_known or not (has_groups or strategy == "channel") or not (packed or symmetric):
        raise ModelError(f"{METHOD} with weights of {said} is not supported")
    assert isinstance(bits, int)
    if weights.get("actorder") in ("group", True):
        raise ModelError(f"{METHOD} with actorder {describe_value(weights.get('actorder'))} is not supported")
    return CompressedIntegers(bits, group if has_groups else None, bool(symmetric), packed)
