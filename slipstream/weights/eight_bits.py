"""Plain weights that are rounded to eight bits in blocks of 32 when they are loaded.

For draft heads beside a target whose weights stay quantised on a CPU: drafts never change a text, and a head that reads
four times the bytes per weight of its target costs more than its drafts save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.kernels.linear.quant_weights import PanelMemory, pack_gguf, packed_bytes
from slipstream.weights.dense import Dense, DenseWeight
from slipstream.weights.matrix import (
    ExpertShape,
    Matrix,
    StoredExperts,
    StoredWeight,
    WeightFormat,
    WeightShape,
)
from slipstream.weights.quantised import PlannedMatrix, can_multiply, join_segments

KIND = "Q8_0"
_BLOCK = 32
_LARGEST = 127


def quantise_rows(weight: Tensor) -> Tensor:
    """[rows, in] float -> [rows, bytes] uint8: blocks of a float16 scale and 32 signed bytes, as in a GGUF file."""
    blocks = weight.detach().to(torch.float32).reshape(-1, _BLOCK).numpy()
    scales = np.abs(blocks).max(axis=1, keepdims=True) / _LARGEST
    with np.errstate(divide="ignore"):
        inverse = np.where(scales == 0, 0, 1 / scales)
    codes = np.rint(blocks * inverse).astype(np.int8)
    raw = np.concatenate([scales.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=1)
    return torch.from_numpy(raw).view(weight.shape[0], -1)


class RoundedWeight(StoredWeight):
    """[num_rows, in_size], as the checkpoint has it until it is finished."""

    def __init__(self, shape: WeightShape, memory: PanelMemory) -> None:
        super().__init__()
        self._shape, self._memory = shape, memory
        self.weight = nn.Parameter(torch.empty(shape.num_rows, shape.in_size), requires_grad=False)

    def slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for (part, _), rows in zip(self._shape.parts.items(), self._split(), strict=True):
            yield f"{prefix}{part}.weight", rows

    def finish(self, device: torch.device) -> Matrix:
        if device.type != "cpu":  # planned without memory for another device, which has no such kernels
            return DenseWeight(self._shape, self.weight).finish(device)
        if self.weight.is_meta:
            sizes = (packed_bytes(KIND, num_rows, self._shape.in_size) for num_rows in self._shape.parts.values())
            return PlannedMatrix(self._shape, sum(sizes), (KIND for _ in self._shape.parts))
        segments = []
        for rows in self._split():
            segment = pack_gguf(quantise_rows(rows), KIND, memory=self._memory)
            assert segment is not None, "weights are rounded only where there are kernels"
            segments.append(segment)
        return join_segments(tuple(segments), self._shape)

    def _split(self) -> tuple[Tensor, ...]:
        return torch.split(self.weight.data, list(self._shape.parts.values()))


class EightBits:
    """Format and scheme: products are rounded where rows are whole blocks; tables and experts stay as they are."""

    def __init__(self) -> None:
        self._memory = PanelMemory()  # shared by all weights of the network

    def open(self, shape: WeightShape) -> StoredWeight:
        return Dense().open(shape) if shape.in_size % _BLOCK else RoundedWeight(shape, self._memory)

    def open_experts(self, shape: ExpertShape) -> StoredExperts:
        return Dense().open_experts(shape)

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        return self

    def format_of_table(self, name: str) -> WeightFormat:
        return Dense()


def can_round() -> bool:
    """Whether a network that is built now, or planned for a CPU, may have such weights."""
    device = torch.get_default_device()
    return can_multiply(torch.device("cpu") if device.type == "meta" else device, torch.get_default_dtype())
