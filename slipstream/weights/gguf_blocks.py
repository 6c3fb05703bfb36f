"""Weights that stay in the blocks of a GGUF file, repacked into panels for the C kernels of a CPU.

A checkpoint that keeps its blocks gives the encoding of each such weight. Its tensors are then rows of raw bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.kernels.linear.quant_weights import KINDS, PanelMemory, QuantSegment, pack_gguf, packed_bytes
from slipstream.weights.dense import Dense
from slipstream.weights.matrix import (
    ExpertShape,
    Matrix,
    PackingSlot,
    StoredExperts,
    StoredWeight,
    WeightFormat,
    WeightShape,
)
from slipstream.weights.quantised import PlannedMatrix, join_segments

METHOD = "gguf"
TYPES = "tensor_types"  # the encoding of each weight that is kept in blocks, by its name without ``.weight``


def is_kept(kind: str) -> bool:
    """Whether weights of that encoding have panels."""
    return kind in KINDS and bool(KINDS[kind].file_block[0])


def row_bytes(kind: str, in_size: int) -> int:
    """Bytes of a row of ``in_size`` weights in the file."""
    weights, num_bytes = KINDS[kind].file_block
    return in_size // weights * num_bytes


class BlocksWeight(StoredWeight):
    """Each part is packed as soon as it is loaded, so that a weight is never in memory twice."""

    def __init__(self, shape: WeightShape, kinds: Mapping[str, str], memory: PanelMemory) -> None:
        super().__init__()
        self._shape, self._kinds, self._memory = shape, kinds, memory
        self._is_planned = torch.get_default_device().type == "meta"
        self._segments: dict[str, QuantSegment] = {}

    def slots(self, prefix: str) -> Iterator[tuple[str, PackingSlot]]:
        for part, num_rows in self._shape.parts.items():
            size = (num_rows, row_bytes(self._kinds[part], self._shape.in_size))
            expected = torch.empty(size, dtype=torch.uint8, device="meta")
            yield f"{prefix}{part}.weight", PackingSlot(expected, partial(self._pack, part))

    def _pack(self, part: str, raw: Tensor) -> None:
        segment = pack_gguf(raw, self._kinds[part], memory=self._memory)
        assert segment is not None, "blocks are kept only where there are kernels"
        self._segments[part] = segment

    def finish(self, device: torch.device) -> Matrix:
        if self._is_planned:
            parts = self._shape.parts.items()
            sizes = (packed_bytes(self._kinds[part], num_rows, self._shape.in_size) for part, num_rows in parts)
            return PlannedMatrix(self._shape, sum(sizes), (self._kinds[part] for part in self._shape.parts))
        return join_segments(tuple(self._segments[part] for part in self._shape.parts), self._shape)


class BlocksFormat:
    """The format of weights that one product stacks: the encoding of each, by its name in the product."""

    def __init__(self, kinds: Mapping[str, str], memory: PanelMemory) -> None:
        self._kinds, self._memory = kinds, memory

    def open(self, shape: WeightShape) -> StoredWeight:
        return BlocksWeight(shape, self._kinds, self._memory)

    def open_experts(self, shape: ExpertShape) -> StoredExperts:
        raise ModelError("experts are not kept in the blocks of a GGUF file")


class GGUFScheme:
    """Weights that are not kept in blocks are dense."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self._types: Mapping[str, str] = quantization[TYPES]
        self._memory = PanelMemory()  # shared by all weights of the network

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        kinds = {name.rpartition(".")[2]: kind for name in names if (kind := self._types.get(name)) is not None}
        return BlocksFormat(kinds, self._memory) if len(kinds) == len(names) else Dense()

    def format_of_table(self, name: str) -> WeightFormat:
        return self.format_of([name])
