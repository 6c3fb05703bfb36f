"""Weights in panels of neighbouring outputs, as the C kernels for CPUs read them, for inputs in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.kernels.elementwise.geglu import ACTIVATIONS
from slipstream.kernels.linear.dense_linear import PackedWeight, cut_panels, narrow_exactly, panel_linear, panel_width
from slipstream.kernels.native.decoder_stack import StackMatrix
from slipstream.weights.matrix import Matrix, WeightShape


class Panels(Matrix):
    """The gate is part of the product where it is silu and there is no bias; otherwise it follows."""

    def __init__(self, packed: PackedWeight, shape: WeightShape) -> None:
        super().__init__(shape.in_size, shape.out_size)
        self.panels = nn.Parameter(packed.panels, requires_grad=False)
        self.packed = packed
        self._shape = shape
        follows = shape.activation and not packed.gated
        self._activate = ACTIVATIONS[shape.activation] if follows else None

    @classmethod
    def pack(cls, weight: Tensor, shape: WeightShape, device: torch.device) -> Panels | None:
        """None where no kernel reads such panels."""
        width = panel_width(device, weight.dtype)
        if width is None:
            return None
        packed = cut_panels(weight, width, gated=shape.activation == "silu" and not shape.has_bias)
        return cls(packed._replace(panels=narrow_exactly(packed.panels)), shape)

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed.gated:
            return panel_linear(x, self.packed.panels, None, self.out_size, True)
        out = panel_linear(x, self.packed.panels, bias, self.packed.out_size, False)
        return out if self._activate is None else self._activate(out)

    def exact(self, device: torch.device) -> Matrix:
        return self  # every output is one chain of additions, whatever the batch

    def stack_matrix(self) -> StackMatrix:
        return self.packed

    def project_wide(self, x: Tensor) -> Tensor:
        return self.project(x, None)  # float32 as it is

    def dequantised(self) -> Tensor:
        rows = self.packed.panels.float().transpose(1, 2)  # [num_panels, panel width, in]
        if not self.packed.gated:
            return rows.reshape(-1, self.in_size)[: self._shape.num_rows]
        parts = [part.reshape(-1, self.in_size)[: self.out_size] for part in rows.chunk(2, dim=1)]
        return torch.cat(parts)
