"""Checkpoints whose weights are floats of eight bits with a scale for each block, dequantised as they are loaded.

Networks multiply with plain numbers of the engine's type. A part of a weight is dequantised once both of its tensors
are there, and no float32 copy is ever larger than ``_MOST_ROWS`` rows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.values import describe_value
from slipstream.weights.dense import Dense, DenseExperts, DenseWeight
from slipstream.weights.matrix import (
    ExpertMatrices,
    ExpertShape,
    Matrix,
    PackingSlot,
    StoredExperts,
    StoredWeight,
    WeightFormat,
    WeightShape,
)

METHOD = "fp8"
# Lists of what is not quantised, by the writers of checkpoints.
_LISTS = ("modules_to_not_convert", "ignored_layers")
# Published configs may have no such list: output matrices, routers, and the product that joins an MTP layer's inputs
# are plain all the same. Embeddings and norms are no products, so they are not asked for here.
_PLAIN = ("lm_head", "mlp.gate", "eh_proj", "weights_proj")
_MOST_ROWS = 2048


class Block(NamedTuple):
    """The part of a weight that shares a scale; what a weight has beyond whole blocks has scales as well."""

    rows: int
    columns: int


def dequantise(codes: Tensor, scales: Tensor, block: Block, out: Tensor) -> None:
    """Write codes [rows, in] times scales [row blocks, column blocks] to ``out``, on its device."""
    wide = torch.promote_types(out.dtype, torch.float32)
    codes, scales = codes.to(out.device), scales.to(out.device, wide)
    at_once = max(1, _MOST_ROWS // block.rows)  # block rows
    pieces = (torch.split(codes, at_once * block.rows), torch.split(scales, at_once))
    for part, own, to in zip(*pieces, torch.split(out, at_once * block.rows), strict=True):
        by_row = own.repeat_interleave(block.columns, 1)[:, : part.shape[1]]
        to.copy_(part.to(wide).mul_(by_row.repeat_interleave(block.rows, 0)[: part.shape[0]]))


@cache
def _expected(num_rows: int, in_size: int, block: Block) -> tuple[Tensor, Tensor]:
    """Codes and scales without memory: a large model asks for many of a few shapes."""
    scales = (-(-num_rows // block.rows), -(-in_size // block.columns))
    with torch.device("meta"):
        return torch.empty(num_rows, in_size, dtype=torch.float8_e4m3fn), torch.empty(scales, dtype=torch.float32)


class _Pair:
    """One weight of a checkpoint, whose two tensors come in any order."""

    def __init__(self, block: Block, out: Tensor) -> None:
        self._block, self._out = block, out
        self._codes: Tensor | None = None
        self._scales: Tensor | None = None

    def take_codes(self, codes: Tensor) -> None:
        self._codes = codes
        self._dequantise()

    def take_scales(self, scales: Tensor) -> None:
        self._scales = scales
        self._dequantise()

    def _dequantise(self) -> None:
        if self._codes is not None and self._scales is not None:
            dequantise(self._codes, self._scales, self._block, self._out)
            self._codes = self._scales = None


def _paired(slots: Iterable[tuple[str, Tensor]], block: Block) -> Iterator[tuple[str, PackingSlot]]:
    """The slots of plain weights, each as one for codes and one for scales."""
    for name, out in slots:
        pair = _Pair(block, out)
        codes, scales = _expected(out.shape[0], out.shape[1], block)
        yield name, PackingSlot(codes, pair.take_codes)
        yield f"{name}_scale_inv", PackingSlot(scales, pair.take_scales)


class BlocksWeight(StoredWeight):
    """Plain memory that is filled with dequantised numbers. Each of the stacked weights has blocks of its own."""

    def __init__(self, shape: WeightShape, block: Block) -> None:
        super().__init__()
        self.plain, self._block = DenseWeight(shape), block

    def slots(self, prefix: str) -> Iterator[tuple[str, PackingSlot]]:
        return _paired(self.plain.slots(prefix), self._block)

    def finish(self, device: torch.device) -> Matrix:
        return self.plain.finish(device)


class BlocksExperts(StoredExperts):
    """The same for a layer of experts."""

    def __init__(self, shape: ExpertShape, block: Block) -> None:
        super().__init__()
        self.plain, self._block = DenseExperts(shape), block

    def slots(self, prefix: str) -> Iterator[tuple[str, PackingSlot]]:
        return _paired(self.plain.slots(prefix), self._block)

    def finish(self, device: torch.device) -> ExpertMatrices:
        return self.plain.finish(device)


class BlocksFormat:
    def __init__(self, block: Block) -> None:
        self._block = block

    def open(self, shape: WeightShape) -> StoredWeight:
        return BlocksWeight(shape, self._block)

    def open_experts(self, shape: ExpertShape) -> StoredExperts:
        return BlocksExperts(shape, self._block)


class FP8Scheme:
    """Every product, but for those that are plain by their name or by a list of the config."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self._format = BlocksFormat(_read_block(quantization))
        self._plain = [*_PLAIN, *(name for key in _LISTS for name in _read_names(quantization, key))]

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        plain = [self._is_plain(name) for name in names]
        if all(plain):
            return Dense()
        if any(plain):
            raise ModelError(f"{METHOD} leaves out a part of {', '.join(names)}, which are one product; not supported")
        return self._format

    def format_of_table(self, name: str) -> WeightFormat:
        return Dense()

    def _is_plain(self, name: str) -> bool:
        """Whether an entry is the name, the end of it, or that of a module around it: ``mlp.gate`` names no
        ``mlp.gate_proj``."""
        return any(f".{entry}." in f".{name}." for entry in self._plain)


def _read_block(quantization: Mapping[str, Any]) -> Block:
    """The size of blocks, once every other setting is one that is known."""
    for key, known in (("fmt", ("e4m3",)), ("activation_scheme", ("dynamic",)), ("scale_fmt", ("ue8m0",))):
        if (given := quantization.get(key)) is not None and given not in known:
            raise ModelError(
                f"{METHOD} with {key} {describe_value(given)} is not supported (supported: {', '.join(known)})"
            )
    size = quantization.get("weight_block_size")
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise ModelError(
            f"{METHOD} with weight_block_size {describe_value(size)} is not supported; rows and columns of a block are"
        )
    return Block(*size)


def _read_names(quantization: Mapping[str, Any], key: str) -> list[str]:
    names = quantization.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"'{key}' of {METHOD} must be a list of names, not {describe_value(names)}")
    return names
