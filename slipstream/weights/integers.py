"""Weights of few bits with a scale for each group of inputs: the common part of the integer formats of checkpoints.

A format says which tensors a weight comes in and how codes are read from them. On a CPU codes are packed for the C
kernels; everywhere else the weight becomes plain numbers of the engine's type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.kernels.linear.quant_weights import PanelMemory, pack_codes, packed_bytes
from slipstream.weights.dense import DenseWeight
from slipstream.weights.matrix import ExpertShape, Matrix, PackingSlot, StoredExperts, StoredWeight, WeightShape
from slipstream.weights.quantised import PlannedMatrix, can_multiply, join_segments


class Codes(NamedTuple):
    """The weight is ``scale * (code - zero)``."""

    codes: Tensor  # [num_rows, in] uint8
    scales: Tensor  # [num_rows, num_groups]
    zeros: Tensor | None  # like scales; None: the middle of the range of codes
    bits: int
    group_of: Tensor | None = None  # [in] int64: the group of each input, where inputs are not grouped in order

    @property
    def group_size(self) -> int:
        return -(-self.codes.shape[1] // self.scales.shape[1])

    def dequantise(self) -> Tensor:
        """[num_rows, in] float32"""
        in_size = self.codes.shape[1]
        group_of = torch.arange(in_size) // self.group_size if self.group_of is None else self.group_of
        scales = self.scales.float()
        zeros = torch.full_like(scales, 1 << (self.bits - 1)) if self.zeros is None else self.zeros.float()
        return scales[:, group_of] * (self.codes.float() - zeros[:, group_of])


class IntegerLayout(Protocol):
    """How one format stores a weight."""

    bits: int

    def group_size(self, in_size: int) -> int: ...

    def expect(self, num_rows: int, in_size: int) -> Mapping[str, Tensor]:
        """The tensors of a weight by the last part of their names: without memory, with their shape and type."""
        ...

    def read(self, tensors: Mapping[str, Tensor], in_size: int) -> Codes: ...


class IntegerWeight(StoredWeight):
    """Tensors are kept until a part is complete and can be packed."""

    def __init__(self, shape: WeightShape, layout: IntegerLayout, memory: PanelMemory) -> None:
        super().__init__()
        self._shape, self._layout, self._memory = shape, layout, memory
        self._is_planned = torch.get_default_device().type == "meta"
        self._dtype = torch.get_default_dtype()
        self._device = torch.get_default_device()
        self._tensors: dict[str, dict[str, Tensor]] = {part: {} for part in shape.parts}

    def slots(self, prefix: str) -> Iterator[tuple[str, PackingSlot]]:
        with torch.device("meta"):
            for part, num_rows in self._shape.parts.items():
                for name, expected in self._layout.expect(num_rows, self._shape.in_size).items():
                    yield f"{prefix}{part}.{name}", PackingSlot(expected, partial(self._keep, part, name))

    def _keep(self, part: str, name: str, tensor: Tensor) -> None:
        self._tensors[part][name] = tensor

    def finish(self, device: torch.device) -> Matrix:
        shape, group_size = self._shape, self._layout.group_size(self._shape.in_size)
        in_panels = can_multiply(device, self._dtype) and (group_size % 32 == 0 or group_size >= shape.in_size)
        if self._is_planned:
            if not in_panels:
                return DenseWeight(shape).finish(device)
            kind, group_blocks = f"INT{self._layout.bits}", -(-group_size // 32)
            sizes = (packed_bytes(kind, rows, shape.in_size, group_blocks) for rows in shape.parts.values())
            return PlannedMatrix(shape, sum(sizes), [kind] * len(shape.parts))
        parts = [self._layout.read(self._tensors.pop(part), shape.in_size) for part in shape.parts]
        if not in_panels or any(codes.group_of is not None for codes in parts):
            weight = torch.cat([codes.dequantise() for codes in parts])
            return DenseWeight(shape, weight.to(self._device, self._dtype)).finish(device)
        segments = tuple(pack_codes(*codes[:4], codes.group_size, self._memory) for codes in parts)
        return join_segments(tuple(segment for segment in segments if segment is not None), shape)


class IntegerFormat:
    def __init__(self, method: str, layout: IntegerLayout) -> None:
        self._method, self._layout = method, layout
        self._memory = PanelMemory()  # shared by all weights of the network

    def open(self, shape: WeightShape) -> StoredWeight:
        return IntegerWeight(shape, self._layout, self._memory)

    def open_experts(self, shape: ExpertShape) -> StoredExperts:
        raise ModelError(f"experts with weights of the kind {self._method} are not supported")


def unpack_nibbles(packed: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [..., n] -> uint8 [..., 8 * n]: nibble i of a number, from the lowest on, goes to index ``order[i]``."""
    shifts = torch.empty(8, dtype=torch.int32)
    shifts[list(order)] = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(-2)
