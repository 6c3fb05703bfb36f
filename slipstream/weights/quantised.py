"""Quantised weights in panels, as the C kernels for CPUs read them, whatever format they came in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from slipstream.kernels import native
from slipstream.kernels.elementwise.geglu import ACTIVATIONS
from slipstream.kernels.linear.quant_linear import default_planes, quant_embedding, quant_linear
from slipstream.kernels.linear.quant_weights import QuantMatrix, QuantSegment, dequantised
from slipstream.kernels.native.decoder_stack import StackMatrix
from slipstream.weights.matrix import Matrix, WeightShape


def can_multiply(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for such weights."""
    return device.type == "cpu" and dtype == torch.float32 and native.library() is not None


class QuantisedMatrix(Matrix):
    """Rows quantised in one way or several, one below the other."""

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

    def formats(self) -> Mapping[str, int]:
        return count_formats(((own.kind, own.num_rows) for own in self.quantised.segments), self.in_size)

    def dequantised(self) -> Tensor:
        return dequantised(self.quantised)

    def exact(self, device: torch.device) -> Matrix:
        return self  # blocks are added in one order, whatever the batch and the number of threads

    def stack_matrix(self) -> StackMatrix | None:
        return self.quantised if self._activate is None else None


class PlannedMatrix(Matrix):
    """The same without memory, for its size."""

    def __init__(self, shape: WeightShape, num_bytes: int, kinds: Iterable[str]) -> None:
        super().__init__(shape.in_size, shape.out_size)
        self._rows = list(zip(kinds, shape.parts.values(), strict=True))
        self.panels = _fixed(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))

    def formats(self) -> Mapping[str, int]:
        return count_formats(self._rows, self.in_size)

    def exact(self, device: torch.device) -> Matrix:
        return self

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise TypeError("a network without memory is only measured")

    def dequantised(self) -> Tensor:
        raise TypeError("a network without memory has no numbers")


def count_formats(rows: Iterable[tuple[str, int]], in_size: int) -> Counter[str]:
    """Numbers of each kind, where so many rows have it."""
    found: Counter[str] = Counter()
    for kind, num_rows in rows:
        found[kind] += num_rows * in_size
    return found


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def join_segments(segments: tuple[QuantSegment, ...], shape: WeightShape) -> QuantisedMatrix:
    """One for each part of the shape."""
    # The product applies the gate where that is silu and nothing is added before.
    gated = shape.activation == "silu" and not shape.has_bias and len(segments) == 2
    return QuantisedMatrix(QuantMatrix(segments, gated), shape)
