"""A format of weights that the package does not know: whole numbers of eight bits, and a scale for each row.

A format is the memory for what a checkpoint brings, a matrix with its operation, and a scheme that says which weights
have it. Nothing else has to be told of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.device.operation import TensorSpec, operation
from slipstream.errors import ModelError
from slipstream.kernels.elementwise.geglu import ACTIVATIONS
from slipstream.weights.dense import Dense
from slipstream.weights.matrix import ExpertShape, Matrix, StoredExperts, StoredWeight, WeightFormat, WeightShape

METHOD = "toy_int8"


class Int8Matrix(Matrix):
    def __init__(self, shape: WeightShape, codes: Tensor, scales: Tensor) -> None:
        super().__init__(shape.in_size, shape.out_size)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self._activate = ACTIVATIONS[shape.activation] if shape.activation else None

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = int8_linear(x, self.codes, self.scales, bias)
        return out if self._activate is None else self._activate(out)

    def project_wide(self, x: Tensor) -> Tensor:
        return self.project(x, None)  # tests run in float32 and float64

    def dequantised(self) -> Tensor:
        return self.codes.to(self.scales.dtype) * self.scales


class Int8Weight(StoredWeight):
    def __init__(self, shape: WeightShape) -> None:
        super().__init__()
        self._shape = shape
        codes = torch.empty(shape.num_rows, shape.in_size, dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.empty(shape.num_rows, 1), requires_grad=False)

    def slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for part, size in self._shape.parts.items():
            yield f"{prefix}{part}.weight", self.codes[start : start + size]
            yield f"{prefix}{part}.weight_scale", self.scales[start : start + size]
            start += size

    def finish(self, device: torch.device) -> Matrix:
        return Int8Matrix(self._shape, self.codes.data, self.scales.data)


class Int8Rows:
    """The format, and the scheme: all weights but those that the checkpoint excepts."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self._ignored = frozenset(quantization.get("ignore", ()))

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        return Dense() if self._ignored.issuperset(names) else self

    def format_of_table(self, name: str) -> WeightFormat:
        return Dense()

    def open(self, shape: WeightShape) -> StoredWeight:
        return Int8Weight(shape)

    def open_experts(self, shape: ExpertShape) -> StoredExperts:
        raise ModelError(f"experts with weights of the kind {METHOD} are not supported")


@operation(lambda x, codes, scales, bias: TensorSpec((x.shape[0], codes.shape[0]), x.dtype))
def int8_linear(
    x: Tensor,  # [num_tokens, in]
    codes: Tensor,  # [out, in] int8
    scales: Tensor,  # [out, 1]
    bias: Tensor | None,  # [out]
) -> Tensor:  # [num_tokens, out]
    out = (x @ codes.to(x.dtype).T) * scales.T
    return out if bias is None else out + bias


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round().to(torch.int8), scales
