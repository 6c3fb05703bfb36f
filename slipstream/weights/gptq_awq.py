"""Checkpoints of GPTQ and AWQ: int4 weights packed along inputs or outputs, with zeros and scales for each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.values import describe_value
from slipstream.weights.dense import Dense
from slipstream.weights.integers import Codes, IntegerFormat, unpack_nibbles
from slipstream.weights.matrix import WeightFormat

# The output that each nibble of AWQ's numbers belongs to, from the lowest nibble up.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class GPTQIntegers:
    """``qweight`` [in / 8, out]: nibble i of a number is input 8 * r + i. Version 1 stores zeros less one."""

    bits = 4

    def __init__(self, group: int | None, zero_shift: int) -> None:
        self._group, self._zero_shift = group, zero_shift

    def group_size(self, in_size: int) -> int:
        return self._group or in_size

    def expect(self, num_rows: int, in_size: int) -> Mapping[str, Tensor]:
        num_groups = -(-in_size // self.group_size(in_size))
        return {
            "qweight": torch.empty(in_size // 8, num_rows, dtype=torch.int32),
            "qzeros": torch.empty(num_groups, num_rows // 8, dtype=torch.int32),
            "scales": torch.empty(num_groups, num_rows),
            "g_idx": torch.empty(in_size, dtype=torch.int32),
        }

    def read(self, tensors: Mapping[str, Tensor], in_size: int) -> Codes:
        codes = unpack_nibbles(tensors["qweight"].T.contiguous())
        zeros = unpack_nibbles(tensors["qzeros"]).to(torch.int16) + self._zero_shift
        group_of = tensors["g_idx"].long()
        in_order = torch.equal(group_of, torch.arange(in_size) // self.group_size(in_size))
        scales = tensors["scales"].T.contiguous()
        return Codes(codes, scales, zeros.T.contiguous(), 4, None if in_order else group_of)


class AWQIntegers:
    """``qweight`` [in, out / 8], outputs interleaved; zeros as they are, interleaved alike."""

    bits = 4

    def __init__(self, group: int | None) -> None:
        self._group = group

    def group_size(self, in_size: int) -> int:
        return self._group or in_size

    def expect(self, num_rows: int, in_size: int) -> Mapping[str, Tensor]:
        num_groups = -(-in_size // self.group_size(in_size))
        return {
            "qweight": torch.empty(in_size, num_rows // 8, dtype=torch.int32),
            "qzeros": torch.empty(num_groups, num_rows // 8, dtype=torch.int32),
            "scales": torch.empty(num_groups, num_rows),
        }

    def read(self, tensors: Mapping[str, Tensor], in_size: int) -> Codes:
        codes = unpack_nibbles(tensors["qweight"], _AWQ_ORDER).T.contiguous()
        zeros = unpack_nibbles(tensors["qzeros"], _AWQ_ORDER).T.contiguous()
        return Codes(codes, tensors["scales"].T.contiguous(), zeros, 4)


class _AllButSome:
    """Every product except those whose names contain one of some strings; never an output matrix."""

    def __init__(self, own: IntegerFormat, excepted: Sequence[str]) -> None:
        self._own, self._excepted = own, (*excepted, "lm_head")

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        return Dense() if any(word in name for word in self._excepted for name in names) else self._own

    def format_of_table(self, name: str) -> WeightFormat:
        return Dense()


def read_gptq(quantization: Mapping[str, Any]) -> _AllButSome:
    group, _ = _read_common("gptq", quantization, ("bits",), ("group_size",))
    form = quantization.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2") or quantization.get("dynamic") or quantization.get("lm_head"):
        raise ModelError(f"gptq with checkpoint_format {describe_value(form)}, dynamic or lm_head is not supported")
    return _AllButSome(IntegerFormat("gptq", GPTQIntegers(group, 1 if form == "gptq" else 0)), ())


def read_awq(quantization: Mapping[str, Any]) -> _AllButSome:
    group, excepted = _read_common("awq", quantization, ("bits", "w_bit"), ("group_size", "q_group_size"))
    version = str(quantization.get("version", "gemm")).lower()
    if version != "gemm" or not quantization.get("zero_point", True):
        raise ModelError(f"awq of version {describe_value(version)}, or without zero_point, is not supported")
    return _AllButSome(IntegerFormat("awq", AWQIntegers(group)), excepted)


def _read_common(
    method: str, quantization: Mapping[str, Any], bits_keys: Sequence[str], group_keys: Sequence[str]
) -> tuple[int | None, Sequence[str]]:
    """The group size, None for one group; and the names that are not quantised."""
    bits = next((quantization[key] for key in bits_keys if quantization.get(key) is not None), None)
    group = next((quantization[key] for key in group_keys if quantization.get(key) is not None), None)
    if bits != 4 or type(group) is not int or not (group == -1 or group > 0):
        raise ModelError(
            f"{method} with {describe_value(bits)} bits and group_size {describe_value(group)} is not supported"
        )
    excepted = quantization.get("modules_to_not_convert") or []
    if not isinstance(excepted, list) or not all(isinstance(name, str) for name in excepted):
        raise ModelError(f"'modules_to_not_convert' of {method} must be a list of names")
    return (None if group == -1 else group), excepted
