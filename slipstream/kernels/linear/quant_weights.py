"""Quantised matrices in memory: the blocks of GGUF files, or plain codes with scales, as the C kernels read them.

The layout is described in ``native/quant_format.h``. Packing takes codes and scales over as they are, so that
``dequantised`` gives what dequantising the file would. Which tensors of a checkpoint are kept so is not decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels import native
from slipstream.kernels.native.records import MatrixRecord, SegmentRecord

PANEL_ROWS, BLOCK = 16, 32
_CACHE_LINE = 64
_CHUNK_BYTES = 64 << 20  # what is not written is not in memory


class Kind(NamedTuple):
    """One way to store weights: scale * (code - zero) + min."""

    number: int  # as in quant_format.h
    bits: int
    zero: int
    header_bytes: int  # of a group
    group_blocks: int  # blocks of 32 inputs that share a header; 0: a matrix says
    file_block: tuple[int, int]  # of GGUF files: weights, bytes; zeros: not a type of theirs


KINDS = {
    "Q4_0": Kind(0, 4, 8, 64, 2, (32, 18)),
    "Q4_1": Kind(1, 4, 0, 64, 1, (32, 20)),
    "Q5_0": Kind(2, 5, 16, 64, 2, (32, 22)),
    "Q5_1": Kind(3, 5, 0, 64, 1, (32, 24)),
    "Q8_0": Kind(4, 8, 128, 64, 2, (32, 34)),
    "Q4_K": Kind(5, 4, 0, 320, 8, (256, 144)),
    "Q5_K": Kind(6, 5, 0, 320, 8, (256, 176)),
    "Q6_K": Kind(7, 6, 32, 320, 8, (256, 210)),
    "INT4": Kind(8, 4, 8, 128, 0, (0, 0)),
    "INT8": Kind(9, 8, 128, 128, 0, (0, 0)),
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantSegment:
    """Neighbouring rows of a matrix that are quantised alike."""

    kind: str
    panels: Tensor  # [num_panels, num_groups, bytes of a group] uint8
    num_rows: int
    in_size: int

    @property
    def group_blocks(self) -> int:
        kind = KINDS[self.kind]
        return (self.panels.shape[2] - kind.header_bytes) // (64 * kind.bits)


@dataclass(frozen=True, slots=True, eq=False)
class QuantMatrix:
    """A matrix [out, in] of one segment or several, or gates and the values they gate in one segment each."""

    segments: tuple[QuantSegment, ...]
    gated: bool = False  # the product is silu(gate) * value, of half the rows
    record: MatrixRecord = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = {segment.in_size for segment in self.segments}
        if len(sizes) != 1:
            raise ValueError(f"parts of one matrix have inputs of different sizes: {sorted(sizes)}")
        if self.gated and (len(self.segments) != 2 or self.segments[0].num_rows != self.segments[1].num_rows):
            raise ValueError("gates and values must be one segment each, of the same size")
        segments = (SegmentRecord * len(self.segments))(*(_record(segment) for segment in self.segments))
        record = MatrixRecord(None, segments, len(segments), self.in_size, self.out_size, self.gated, 0)
        object.__setattr__(self, "record", record)

    @property
    def in_size(self) -> int:
        return self.segments[0].in_size

    @property
    def out_size(self) -> int:
        return sum(segment.num_rows for segment in self.segments) // (2 if self.gated else 1)

    @property
    def nbytes(self) -> int:
        return sum(segment.panels.nbytes for segment in self.segments)


def _record(segment: QuantSegment) -> SegmentRecord:
    return SegmentRecord(segment.panels.data_ptr(), KINDS[segment.kind].number, segment.num_rows, segment.group_blocks)


class PanelMemory:
    """Memory for the panels of a model, side by side in large pages: reading small ones costs up to a fifth more.

    What it handed out stays valid without it, and is freed chunk by chunk.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Bytes that start at a cache line."""
        if num_bytes > self._chunk.numel():
            self._chunk = torch.empty(max(num_bytes, _CHUNK_BYTES), dtype=torch.uint8)
            if (lib := native.library()) is not None:
                lib.slip_use_large_pages(self._chunk.data_ptr(), self._chunk.numel())
        taken = self._chunk[:num_bytes]
        self._chunk = self._chunk[-(-num_bytes // _CACHE_LINE) * _CACHE_LINE :]
        return taken


def _take_panels(memory: PanelMemory | None, kind: Kind, num_rows: int, in_size: int, group_blocks: int) -> Tensor:
    shape = _panels_shape(kind, num_rows, in_size, group_blocks)
    if memory is None:
        return torch.empty(shape, dtype=torch.uint8)
    return memory.take(math.prod(shape)).view(shape)


def packed_bytes(kind: str, num_rows: int, in_size: int, group_blocks: int = 0) -> int:
    """Of such a segment in memory. ``group_blocks`` is asked for where the kind leaves it open."""
    return math.prod(_panels_shape(KINDS[kind], num_rows, in_size, group_blocks or KINDS[kind].group_blocks))


def _panels_shape(kind: Kind, num_rows: int, in_size: int, group_blocks: int) -> tuple[int, int, int]:
    num_groups = -(-in_size // (BLOCK * group_blocks))
    return -(-num_rows // PANEL_ROWS), num_groups, kind.header_bytes + group_blocks * 64 * kind.bits


def pack_gguf(
    raw: Tensor,  # [num_rows, bytes of a row] uint8: blocks as in the file
    kind: str,
    row_order: Tensor | None = None,  # [num_rows]: the file's row for each of the matrix
    memory: PanelMemory | None = None,  # shared by the matrices of a model
) -> QuantSegment | None:
    """Rows of a GGUF tensor; None for types that have no panels, or without C kernels."""
    lib = native.library()
    if lib is None or kind not in KINDS or not KINDS[kind].file_block[0]:
        return None
    weights, num_bytes = KINDS[kind].file_block
    if raw.dtype is not torch.uint8 or raw.dim() != 2 or raw.shape[1] % num_bytes:
        raise ValueError(f"no rows of {kind}: {tuple(raw.shape)} {raw.dtype}")
    raw = raw.contiguous()
    num_rows, in_size = raw.shape[0], raw.shape[1] // num_bytes * weights
    order = None if row_order is None else row_order.to(torch.int64).contiguous()
    if order is not None and (order.shape != (num_rows,) or not 0 <= int(order.min()) <= int(order.max()) < num_rows):
        raise ValueError(f"no order of {num_rows} rows: {order}")
    panels = _take_panels(memory, KINDS[kind], num_rows, in_size, KINDS[kind].group_blocks)
    sizes = (num_rows, in_size, panels.data_ptr(), torch.get_num_threads())
    lib.slip_pack_gguf(KINDS[kind].number, raw.data_ptr(), None if order is None else order.data_ptr(), *sizes)
    return QuantSegment(kind, panels, num_rows, in_size)


def pack_codes(
    codes: Tensor,  # [num_rows, in] uint8
    scales: Tensor,  # [num_rows, in / group_size, rounded up]
    zeros: Tensor | None,  # like scales: codes of the weight 0; None: 8 of 4 bits, 128 of 8
    bits: int,
    group_size: int,  # inputs, a multiple of 32; or all, for one scale a row
    memory: PanelMemory | None = None,
) -> QuantSegment | None:
    """A weight scale * (code - zero) in groups along the inputs; None without C kernels."""
    if (lib := native.library()) is None:
        return None
    num_rows, in_size = codes.shape
    num_groups = -(-in_size // group_size)
    if bits not in (4, 8) or (num_groups > 1 and group_size % BLOCK):
        raise ValueError(f"groups of {group_size} codes of {bits} bits have no panels")
    if codes.dtype is not torch.uint8 or any(
        t is not None and t.shape != (num_rows, num_groups) for t in (scales, zeros)
    ):
        raise ValueError(f"codes {tuple(codes.shape)} {codes.dtype} do not go with scales {tuple(scales.shape)}")
    name = f"INT{bits}"
    group_blocks = -(-group_size // BLOCK)
    panels = _take_panels(memory, KINDS[name], num_rows, in_size, group_blocks)
    codes, scales = codes.contiguous(), scales.to(torch.float32).contiguous()
    zeros = None if zeros is None else zeros.to(torch.float32).contiguous()
    arrays = (codes.data_ptr(), scales.data_ptr(), None if zeros is None else zeros.data_ptr())
    sizes = (num_rows, in_size, group_blocks, panels.data_ptr(), torch.get_num_threads())
    lib.slip_pack_codes(KINDS[name].number, *arrays, *sizes)
    return QuantSegment(name, panels, num_rows, in_size)


def dequantised(matrix: QuantMatrix) -> Tensor:  # [rows of all segments, in] float32
    """The definition of what a matrix holds."""
    return torch.cat([_dequantised_segment(segment) for segment in matrix.segments])


def _dequantised_segment(segment: QuantSegment) -> Tensor:
    kind = KINDS[segment.kind]
    num_panels, num_groups, _ = segment.panels.shape
    header, rest = segment.panels[:, :, : kind.header_bytes], segment.panels[:, :, kind.header_bytes :]
    codes = _codes(kind, rest.reshape(num_panels, num_groups, -1, 64 * kind.bits))
    scales, mins = _scales(segment.kind, header.contiguous(), codes.shape[2])
    # Both with the axes [panel, group, block, part, chunk, lane, input].
    parts = scales.shape[3]
    values = codes.to(torch.float32).sub_(kind.zero).view(*codes.shape[:3], parts, 8 // parts, PANEL_ROWS, 4)
    values = values * scales[:, :, :, :, None, :, None]
    if mins is not None:
        values = values + mins[:, :, :, :, None, :, None]
    rows = values.permute(0, 5, 1, 2, 3, 4, 6).reshape(num_panels * PANEL_ROWS, -1)
    return rows[: segment.num_rows, : segment.in_size].contiguous()


def _codes(kind: Kind, blocks: Tensor) -> Tensor:  # [panel, group, block, chunk, lane, input]
    lead = blocks.shape[:3]
    if kind.bits == 8:
        return blocks.view(*lead, 8, PANEL_ROWS, 4)
    low = blocks[..., :256].reshape(*lead, 4, 1, PANEL_ROWS, 4)
    codes = torch.cat([low & 15, low >> 4], dim=4).reshape(*lead, 8, PANEL_ROWS, 4)
    if kind.bits == 4:
        return codes
    # Of 5 bits one byte has the fifth bits of 8 chunks, of 6 bits the upper pairs of 4.
    extra = kind.bits - 4
    high = blocks[..., 256:].reshape(*lead, extra, 1, PANEL_ROWS, 4)
    shifted = torch.cat([(high >> shift) & (2**extra - 1) for shift in range(0, 8, extra)], dim=4)
    return torch.add(codes, shifted.reshape(codes.shape), alpha=16)


def _scales(name: str, header: Tensor, num_blocks: int) -> tuple[Tensor, Tensor | None]:
    """Scales and mins, each [panel, group, block, part, lane] or with ones where they are the same."""
    shape = (*header.shape[:2], -1, 1, PANEL_ROWS)
    if name in ("INT4", "INT8"):
        numbers = header.view(torch.float32).view(shape)
        return numbers[:, :, :1], numbers[:, :, 1:]
    halves = header[..., :64].contiguous().view(torch.float16).to(torch.float32).view(shape)
    if name in ("Q4_0", "Q5_0", "Q8_0"):
        return halves, None
    first, second = halves[:, :, :1], halves[:, :, 1:]
    if name in ("Q4_1", "Q5_1"):
        return first, second
    integers = header[..., 64:]
    if name == "Q6_K":
        signed = integers.contiguous().view(torch.int8).to(torch.float32)
        return first * signed.view(*shape[:2], num_blocks, 2, PANEL_ROWS), None
    scales, mins = (integers[..., i : i + 128].to(torch.float32).view(shape) for i in (0, 128))
    return first * scales, -(second * mins)
