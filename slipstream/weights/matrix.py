"""What layers ask of a stored weight, and what a format of weights has to bring.

A format opens the memory that a checkpoint's tensors go to (``StoredWeight``), and when they are there it makes the
``Matrix`` that layers multiply with. Only these two know how numbers lie in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels.decoder_stack import StackMatrix
from slipstream.kernels.small_linear import Epilogue, Product, Scaled
from slipstream.kernels.tiles import Kind
from slipstream.kernels.tiles import Weight as TileKey


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
    """In place of memory, where a format brings a tensor into its own layout as soon as it comes."""

    expected: Tensor  # without memory, of the shape and the type that the tensor must have
    fill: Callable[[Tensor], None]


Slot = Tensor | PackingSlot


class Matrix(nn.Module, ABC):
    """A weight in the memory layout it is multiplied from. Its tensors are parameters of the module, and nothing else.

    ``project`` and ``dequantised`` are all that a new layout must bring; the rest has an answer that is right
    everywhere and fast nowhere.
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
        """[num_rows, in_size]: the numbers that the products are defined by."""

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())

    def formats(self) -> Mapping[str, int]:
        """What users call the kinds of numbers that it holds, and how many of each there are."""
        parameter = next(self.parameters())
        return {str(parameter.dtype).removeprefix("torch."): parameter.numel()}

    def project_wide(self, x: Tensor) -> Tensor:
        """The same product with sums in float32 at least, for logits: neighbours there are close together."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.dequantised().to(wide))

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Rows of a table, such as an embedding: [num_tokens] int32 -> [num_tokens, in_size]."""
        return torch.index_select(self.dequantised(), 0, token_ids)

    def for_products(self, device: torch.device) -> Matrix:
        """Of a table that is an output matrix as well: the same numbers in the layout that multiplies fastest."""
        return self

    def stack_matrix(self) -> StackMatrix | None:
        """As the operation over all layers of a CPU takes it; None: layers with such a matrix run one by one."""
        return None

    def rows(self, first: int, count: int) -> Matrix:
        """A part of the outputs. Heads that only keep keys of a token want no queries of it."""
        return RowRange(self, first, count)

    def tile_key(self, kind: Kind) -> TileKey | None:
        """What the cut of a fused product of that kind is looked up by; None: ``project_few`` cannot run."""
        return None

    def project_few(self, x: Tensor | Scaled, end: Epilogue) -> Product:
        """For few tokens on a GPU: the product with its neighbours folded in. See ``kernels/fused_linear``."""
        raise TypeError(f"{type(self).__name__} has no fused products; tile_key says so")


class RowRange(Matrix):
    """Some rows of a matrix that cannot be cut: all are multiplied, the others are left out."""

    def __init__(self, whole: Matrix, first: int, count: int) -> None:
        super().__init__(whole.in_size, count)
        self.whole, self._range = whole, slice(first, first + count)

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = self.whole.project(x, None)[:, self._range]
        return out if bias is None else out + bias

    def dequantised(self) -> Tensor:
        return self.whole.dequantised()[self._range]


class StoredWeight(nn.Module, ABC):
    """Memory for what a checkpoint brings of one product's weight, under torch's default device and type.

    Its tensors are parameters of the module. One that can be multiplied with as it is may be a ``Matrix`` as well.
    """

    @abstractmethod
    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Every tensor that the checkpoint must bring, by its name there, beside where it goes."""

    def finish_table(self, device: torch.device) -> Matrix:
        """As ``finish``, where rows are looked up, and products may be wanted or not."""
        return self.finish(device)

    @abstractmethod
    def finish(self, device: torch.device) -> Matrix:
        """When all tensors are there: bring them into the layout for this device. The memory here is dropped then.

        The tensors may have no memory of their own (torch's meta device): so the engine's is planned.
        """


class ExpertMatrices(nn.Module, ABC):
    """The weights of a layer of experts, in the layout they are multiplied from."""

    def formats(self) -> Mapping[str, int]:
        """As ``Matrix.formats``."""
        parameters = list(self.parameters())
        return {str(parameters[0].dtype).removeprefix("torch."): sum(each.numel() for each in parameters)}

    @abstractmethod
    def run(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """x [num_tokens, hidden] -> the same: what each token's experts make of it, by weight.

        ``weights`` and ``expert_ids`` are [num_tokens, experts of a token], from ``route_tokens``.
        """


class StoredExperts(nn.Module, ABC):
    """As ``StoredWeight``, of all experts of a layer."""

    @abstractmethod
    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]: ...

    @abstractmethod
    def finish(self, device: torch.device) -> ExpertMatrices: ...


class WeightFormat(Protocol):
    def open(self, shape: WeightShape) -> StoredWeight:
        """Under the device and the type that the network is built under."""
        ...

    def open_experts(self, shape: ExpertShape) -> StoredExperts:
        """The same for a layer of experts; a ``ModelError`` where the format has none."""
        ...


class WeightScheme(Protocol):
    """Which format each weight of a checkpoint has."""

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        """Of the weights that one product stacks, or of a layer's experts, by their full names without ``.weight``."""
        ...

    def format_of_table(self, name: str) -> WeightFormat:
        """Of an embedding: most checkpoints that quantise products do not quantise it."""
        ...
