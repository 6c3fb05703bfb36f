"""Unquantised weights in the engine's own type, as most checkpoints store them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from slipstream.kernels.elementwise.geglu import ACTIVATIONS
from slipstream.kernels.linear.dense_linear import embedding, head_logits, linear
from slipstream.kernels.linear.fused_linear import (
    linear_add,
    linear_add_scaled,
    linear_few,
    linear_scaled,
    scaled_gated,
    scaled_linear,
)
from slipstream.kernels.linear.moe import expert_mlp
from slipstream.kernels.linear.small_linear import Epilogue, Product, Scaled
from slipstream.kernels.tuning.tiles import Kind
from slipstream.kernels.tuning.tiles import Weight as TileKey
from slipstream.weights.exact_dense import ExactWeight, has_exact_products
from slipstream.weights.matrix import (
    ExpertMatrices,
    ExpertShape,
    Matrix,
    StoredExperts,
    StoredWeight,
    WeightFormat,
    WeightShape,
)
from slipstream.weights.panels import Panels


class DenseWeight(StoredWeight, Matrix):
    """[num_rows, in_size]. It is multiplied with in its loaded layout, or copied into panels for a CPU."""

    def __init__(self, shape: WeightShape, weight: Tensor | None = None) -> None:
        Matrix.__init__(self, shape.in_size, shape.out_size)
        self.shape = shape
        weight = torch.empty(shape.num_rows, shape.in_size) if weight is None else weight
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self._activate = ACTIVATIONS[shape.activation] if shape.activation else None

    @classmethod
    def from_tensor(cls, weight: Tensor) -> DenseWeight:
        """A matrix over an existing tensor."""
        return cls(WeightShape(weight.shape[1], {"": weight.shape[0]}), weight)

    def slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for part, size in self.shape.parts.items():
            yield f"{prefix}{part}.weight", self.weight[start : start + size]
            start += size

    def finish(self, device: torch.device) -> Matrix:
        return Panels.pack(self.weight.data, self.shape, device) or self

    def finish_table(self, device: torch.device) -> Matrix:
        return self

    def look_up(self, token_ids: Tensor) -> Tensor:
        return embedding(self.weight, token_ids)

    def for_products(self, device: torch.device) -> Matrix:
        return self.finish(device)

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = linear(x, self.weight, bias)
        return out if self._activate is None else self._activate(out)

    def project_wide(self, x: Tensor) -> Tensor:
        return head_logits(x, self.weight)

    def dequantised(self) -> Tensor:
        return self.weight.data

    def rows(self, first: int, count: int) -> Matrix:
        return DenseWeight.from_tensor(self.weight.data[first : first + count])

    def exact(self, device: torch.device) -> Matrix | None:
        return ExactWeight(self.shape, self.weight) if has_exact_products(device) else None

    def tile_key(self, kind: Kind) -> TileKey | None:
        return TileKey(kind, self.out_size, self.in_size, self.weight.element_size())

    def project_few(self, x: Tensor | Scaled, end: Epilogue) -> Product:
        weight, bias, residual, gain, activation = self.weight, *end
        if isinstance(x, Scaled):
            if activation:
                return Product(scaled_gated(*x, weight, bias, activation), None, None)
            return Product(scaled_linear(*x, weight, bias), None, None)
        if residual is None and gain is None:
            return Product(linear_few(x, weight, bias), None, None)
        if residual is None:
            assert gain is not None
            return Product(*linear_scaled(x, weight, bias, gain))
        if gain is None:
            return Product(linear_add(x, weight, bias, residual), None, None)
        return Product(*linear_add_scaled(x, weight, bias, residual, gain))


class DenseExperts(StoredExperts, ExpertMatrices):
    """Each kind of weight of all experts in one tensor."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        num, hidden, size = shape
        self.gate_up = nn.Parameter(torch.empty(num, 2 * size, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(num, hidden, size), requires_grad=False)

    def slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for idx, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            yield f"{prefix}{idx}.gate_proj.weight", gate
            yield f"{prefix}{idx}.up_proj.weight", up
            yield f"{prefix}{idx}.down_proj.weight", down

    def finish(self, device: torch.device) -> ExpertMatrices:
        return self

    def is_exact(self, device: torch.device) -> bool:
        return has_exact_products(device)

    def run(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        return expert_mlp(x, weights, expert_ids, self.gate_up, self.down)


class Dense:
    """The format of unquantised weights, and the scheme of a checkpoint that does not mention formats."""

    def open(self, shape: WeightShape) -> StoredWeight:
        return DenseWeight(shape)

    def open_experts(self, shape: ExpertShape) -> StoredExperts:
        return DenseExperts(shape)

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        return self

    def format_of_table(self, name: str) -> WeightFormat:
        return self
