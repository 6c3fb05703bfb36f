"""Weights that stay in the blocks of a GGUF file, repacked into panels for the C kernels of a CPU.

A checkpoint that keeps its blocks names the encoding of each such weight. Its tensors are rows of raw bytes then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.kernels import native
from slipstream.kernels.decoder_stack import StackMatrix
from slipstream.kernels.geglu import ACTIVATIONS
from slipstream.kernels.quant_linear import default_planes, quant_embedding, quant_linear
from slipstream.kernels.quant_weights import KINDS, QuantMatrix, QuantSegment, dequantised, pack_gguf, packed_bytes
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

METHOD = "gguf"
TYPES = "tensor_types"  # the encoding of each weight that is kept in blocks, by its name without ``.weight``


def can_keep_blocks() -> bool:
    """Whether this machine has kernels that multiply with blocks."""
    return native.library() is not None


def is_kept(kind: str) -> bool:
    """Whether weights of that encoding have panels."""
    return kind in KINDS and bool(KINDS[kind].file_block[0])


def row_bytes(kind: str, in_size: int) -> int:
    """Of a row of so many weights in the file."""
    weights, num_bytes = KINDS[kind].file_block
    return in_size // weights * num_bytes


class Blocks(Matrix):
    """Rows of one encoding or several, one below the other."""

    def __init__(self, quantised: QuantMatrix, shape: WeightShape) -> None:
        super().__init__(shape.in_size, shape.out_size)
        self.quantised = quantised
        self._panels = nn.ParameterList(_fixed(segment.panels) for segment in quantised.segments)
        self._activate = ACTIVATIONS[shape.activation] if shape.activation and not quantised.gated else None
        self._planes = default_planes()

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = quant_linear(x, self.quantised, bias, self._planes)
        return out if self._activate is None else self._activate(out)

    def project_wide(self, x: Tensor) -> Tensor:
        return quant_linear(x, self.quantised, None, self._planes)  # float32 as it is

    def look_up(self, token_ids: Tensor) -> Tensor:
        return quant_embedding(token_ids, self.quantised)

    def dequantised(self) -> Tensor:
        return dequantised(self.quantised)

    def stack_matrix(self) -> StackMatrix | None:
        return self.quantised if self._activate is None else None


class PlannedBlocks(Matrix):
    """The same without memory, for its size."""

    def __init__(self, shape: WeightShape, num_bytes: int) -> None:
        super().__init__(shape.in_size, shape.out_size)
        self.panels = _fixed(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise TypeError("a network without memory is only measured")

    def dequantised(self) -> Tensor:
        raise TypeError("a network without memory has no numbers")


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class BlocksWeight(StoredWeight):
    """Each part is packed as it comes, so that a weight is never in memory twice."""

    def __init__(self, shape: WeightShape, kinds: Mapping[str, str]) -> None:
        super().__init__()
        self._shape, self._kinds = shape, kinds
        self._is_planned = torch.get_default_device().type == "meta"
        self._segments: dict[str, QuantSegment] = {}

    def slots(self, prefix: str) -> Iterator[tuple[str, PackingSlot]]:
        for part, num_rows in self._shape.parts.items():
            size = (num_rows, row_bytes(self._kinds[part], self._shape.in_size))
            expected = torch.empty(size, dtype=torch.uint8, device="meta")
            yield f"{prefix}{part}.weight", PackingSlot(expected, partial(self._pack, part))

    def _pack(self, part: str, raw: Tensor) -> None:
        segment = pack_gguf(raw, self._kinds[part])
        assert segment is not None, "blocks are kept only where there are kernels"
        self._segments[part] = segment

    def finish(self, device: torch.device) -> Matrix:
        if self._is_planned:
            parts = self._shape.parts.items()
            sizes = (packed_bytes(self._kinds[part], num_rows, self._shape.in_size) for part, num_rows in parts)
            return PlannedBlocks(self._shape, sum(sizes))
        segments = tuple(self._segments[part] for part in self._shape.parts)
        # The product applies the gate where that is silu and nothing is added before.
        gated = self._shape.activation == "silu" and not self._shape.has_bias and len(segments) == 2
        return Blocks(QuantMatrix(segments, gated), self._shape)


class BlocksFormat:
    """Of the weights that one product stacks: the encoding of each, by its name in the product."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._kinds = kinds

    def open(self, shape: WeightShape) -> StoredWeight:
        return BlocksWeight(shape, self._kinds)

    def open_experts(self, shape: ExpertShape) -> StoredExperts:
        raise ModelError("experts are not kept in the blocks of a GGUF file")


class GGUFScheme:
    """What is not kept in blocks comes as plain numbers."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self._types: Mapping[str, str] = quantization[TYPES]

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        kinds = {name.rpartition(".")[2]: kind for name in names if (kind := self._types.get(name)) is not None}
        return BlocksFormat(kinds) if len(kinds) == len(names) else Dense()

    def format_of_table(self, name: str) -> WeightFormat:
        return self.format_of([name])
