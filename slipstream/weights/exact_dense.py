"""Plain weights on a GPU, multiplied so that a token's result depends on that token alone, to the bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.kernels.linear.dense_linear import embedding
from slipstream.kernels.linear.exact_linear import Tokens, exact_linear, exact_linear_scaled, tokens_of
from slipstream.kernels.linear.small_linear import Epilogue, Product, Scaled
from slipstream.kernels.triton_jit import interprets
from slipstream.kernels.tuning.tiles import Kind
from slipstream.kernels.tuning.tiles import Weight as TileKey
from slipstream.weights.matrix import Matrix, WeightShape


def has_exact_products(device: torch.device) -> bool:
    """A CPU's library sums in an order that depends on the batch."""
    return device.type != "cpu" or interprets()


class ExactWeight(Matrix):
    """[num_rows, in_size], in the layout of the checkpoint; whatever the number of tokens, one way of adding up."""

    def __init__(self, shape: WeightShape, weight: nn.Parameter) -> None:
        super().__init__(shape.in_size, shape.out_size)
        self.shape, self.weight = shape, weight

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return exact_linear(Tokens(x), self.weight, Epilogue(bias, activation=self.shape.activation))

    def project_wide(self, x: Tensor) -> Tensor:
        return exact_linear(Tokens(x), self.weight, Epilogue(), True)

    def look_up(self, token_ids: Tensor) -> Tensor:
        return embedding(self.weight, token_ids)

    def dequantised(self) -> Tensor:
        return self.weight.data

    def exact(self, device: torch.device) -> Matrix:
        return self

    def rows(self, first: int, count: int) -> Matrix:
        part = nn.Parameter(self.weight.data[first : first + count], requires_grad=False)
        return ExactWeight(WeightShape(self.in_size, {"": count}), part)

    def tile_key(self, kind: Kind) -> TileKey:
        return TileKey(kind, self.out_size, self.in_size, self.weight.element_size())

    def project_few(self, x: Tensor | Scaled, end: Epilogue) -> Product:
        if end.gain is None:
            return Product(exact_linear(tokens_of(x), self.weight, end), None, None)
        return Product(*exact_linear_scaled(tokens_of(x), self.weight, end))
