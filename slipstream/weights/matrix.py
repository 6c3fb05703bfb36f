"""The interface between layers and stored weights, and what a weight format has to provide.

A format opens the memory for a checkpoint's tensors (``StoredWeight``); once they are loaded it creates the ``Matrix``
that layers multiply with. Only these two know how numbers are laid out in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels.linear.small_linear import Epilogue, Product, Scaled
from slipstream.kernels.native.decoder_stack import StackMatrix
from slipstream.kernels.tuning.tiles import Kind
from slipstream.kernels.tuning.tiles import Weight as TileKey


class WeightShape(NamedTuple):
    """A product's weight: several of a checkpoint's, stacked."""

    in_size: int
    parts: Mapping[str, int]  # the rows of each, by its name in the checkpoint
    # Where the first half of the rows gates the second: "silu" or "gelu_tanh". The product is then of half the size.
    activation: str = ""
    has_bias: bool = False

    @property
    def num_params(self) -> int:
        return self.num_rows * self.in_size

    @property
    def num_rows(self) -> int:
        return sum(self.parts.values())

    @property
    def out_size(self) -> int:
        return self.num_rows // 2 if self.activation else self.num_rows


class ExpertShape(NamedTuple):
    """The weights of a layer of experts, each with a gated product and one back."""

    num_experts: int
    hidden_size: int
    intermediate_size: int

    @property
    def num_params(self) -> int:
        return self.num_experts * 3 * self.hidden_size * self.intermediate_size


class PackingSlot(NamedTuple):
    """Replaces memory where a format converts a tensor to its own layout as soon as it is loaded."""

    expected: Tensor  # without memory, with the shape and the type that the tensor must have
    fill: Callable[[Tensor], None]


Slot = Tensor | PackingSlot


class Matrix(nn.Module, ABC):
    """A weight in the memory layout it is multiplied from. Its tensors are parameters of the module, and nothing else.

    ``project`` and ``dequantised`` are all that a new layout must provide; the other methods have defaults that are
    correct everywhere but not fast.
    """

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.in_size = in_size
        self.out_size = out_size  # of the product

    @abstractmethod
    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_tokens, in_size] -> [num_tokens, out_size], gated where the shape says so."""

    @abstractmethod
    def dequantised(self) -> Tensor:
        """[num_rows, in_size]: the numbers that define the products."""

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())

    def formats(self) -> Mapping[str, int]:
        """The kinds of numbers that it holds, by the names that users know, with the count of each."""
        parameter = next(self.parameters())
        return {str(parameter.dtype).removeprefix("torch."): parameter.numel()}

    def project_wide(self, x: Tensor) -> Tensor:
        """The same product with sums in float32 at least, for logits, whose differences may be small."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.dequantised().to(wide))

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Rows of a table, such as an embedding: [num_tokens] int32 -> [num_tokens, in_size]."""
        return torch.index_select(self.dequantised(), 0, token_ids)

    def for_products(self, device: torch.device) -> Matrix:
        """For a table that is an output matrix as well: the same numbers in the layout that multiplies fastest."""
        return self

    def stack_matrix(self) -> StackMatrix | None:
        """The form for the operation over all layers on a CPU; None: layers with such a matrix run one by one."""
        return None

    def rows(self, first: int, count: int) -> Matrix:
        """A part of the outputs, for passes that only write keys and values of a token."""
        return RowRange(self, first, count)

    def exact(self, device: torch.device) -> Matrix | None:
        """The same numbers with products in which a token's result, to the bit, depends on that token alone, however
        many are multiplied with it; None if this layout has none on that device. May be called on the meta device."""
        return None

    def tile_key(self, kind: Kind) -> TileKey | None:
        """The key of the tile table for a fused product of that kind; None: ``project_few`` cannot run."""
        return None

    def project_few(self, x: Tensor | Scaled, end: Epilogue) -> Product:
        """For few tokens on a GPU: the product with the operations around it fused. See ``kernels/fused_linear``."""
        raise TypeError(f"{type(self).__name__} has no fused products; tile_key says so")


class RowRange(Matrix):
    """Some rows of a matrix that cannot be split: all are multiplied, the others dropped."""

    def __init__(self, whole: Matrix, first: int, count: int) -> None:
        super().__init__(whole.in_size, count)
        self.whole, self._range = whole, slice(first, first + count)

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = self.whole.project(x, None)[:, self._range]
        return out if bias is None else out + bias

    def dequantised(self) -> Tensor:
        return self.whole.dequantised()[self._range]


class StoredWeight(nn.Module, ABC):
    """Memory for a checkpoint's tensors of one product's weight, under torch's default device and type.

    Its tensors are parameters of the module. If it can be multiplied with as loaded, it may be a ``Matrix`` as well.
    """

    @abstractmethod
    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Every tensor that the checkpoint must bring, by its name there, with its destination."""

    def finish_table(self, device: torch.device) -> Matrix:
        """As ``finish``, for a table whose rows are looked up, and which may also be used for products."""
        return self.finish(device)

    @abstractmethod
    def finish(self, device: torch.device) -> Matrix:
        """Convert the loaded tensors to the layout for this device; the memory here is dropped afterwards.

        The tensors may be on torch's meta device, which is how the engine's memory is planned.
        """


class ExpertMatrices(nn.Module, ABC):
    """The weights of a layer of experts, in the layout they are multiplied from."""

    def formats(self) -> Mapping[str, int]:
        """As ``Matrix.formats``."""
        parameters = list(self.parameters())
        return {str(parameters[0].dtype).removeprefix("torch."): sum(each.numel() for each in parameters)}

    def is_exact(self, device: torch.device) -> bool:
        """Whether a token's result, to the bit, depends on that token alone; see ``Matrix.exact``."""
        return False

    @abstractmethod
    def run(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """x [num_tokens, hidden] -> the same: the weighted sum of its experts' outputs for each token.

        ``weights`` and ``expert_ids`` are [num_tokens, experts of a token], from ``route_tokens``.
        """


class StoredExperts(nn.Module, ABC):
    """As ``StoredWeight``, for all experts of a layer."""

    @abstractmethod
    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]: ...

    @abstractmethod
    def finish(self, device: torch.device) -> ExpertMatrices: ...


class WeightFormat(Protocol):
    def open(self, shape: WeightShape) -> StoredWeight:
        """Called under the device and the type that the network is built under."""
        ...

    def open_experts(self, shape: ExpertShape) -> StoredExperts:
        """The same for a layer of experts; raises ``ModelError`` if the format does not support them."""
        ...


class WeightScheme(Protocol):
    """Which format each weight of a checkpoint has."""

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        """For the weights that one product stacks, or a layer's experts, by full names without ``.weight``."""
        ...

    def format_of_table(self, name: str) -> WeightFormat:
        """For an embedding, which most checkpoints that quantise products do not quantise."""
        ...
