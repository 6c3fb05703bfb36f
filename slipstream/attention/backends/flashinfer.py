"""The FlashInfer backend: decodes and prefills of a batch run separately, each on the path chosen for it.

Decodes come first in a batch. Each part gets exactly what its path reads, and nothing else is built. Native paths plan
on the host, from lengths that are exact only while no other step is in flight: the metadata then has them
(``num_computed_cpu``), and a batch without them is refused. The other paths read every length on the device.

The library treats unused draft slots as tokens, so a request's keys are counted as if all of its query tokens existed.
Results of unused slots are zeroed, and so are their keys: other tokens mask them, but a weight of zero does not remove
a NaN that earlier use of the slot may have left.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.backends.flashinfer_library import (
    ContextKeys,
    DecodeKeys,
    LayerShape,
    Library,
    PassSizes,
    Planned,
    PlanPages,
)
from slipstream.attention.backends.flashinfer_paths import DTYPES, ExactLengths, Paths, needs_of
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.operation import TensorSpec, operation

Int32s = npt.NDArray[np.int32]
UnusedSlots = tuple[Tensor, Tensor]  # page and offset of each unused slot

_NO_STARTS = (
    "FlashInfer reads every slot of a sequence, causally; a drafter with gaps in its keys needs another backend"
)


class ExactLengthsError(RuntimeError):
    """A path would have planned from lengths that are only upper bounds."""


# --- launches -------------------------------------------------------------------------------------


@operation(writes=("out",))
def flashinfer_planned(
    q: Tensor, kv_cache: Tensor, page_ids: tuple[Tensor, ...], unused: Tensor, out: Tensor, planned: Planned
) -> None:
    planned.run(q, kv_cache, page_ids, out)
    out.masked_fill_(unused[:, None, None], 0.0)


@operation(writes=("out",))
def flashinfer_decode(
    q: Tensor,
    kv_cache: Tensor,
    keys: DecodeKeys,
    unused: Tensor,
    out: Tensor,
    library: Library,
    sizes: PassSizes,
) -> None:
    library.trtllm_decode(q, kv_cache, keys, out, sizes)
    out.masked_fill_(unused[:, None, None], 0.0)


@operation(writes=("out",))
def flashinfer_context(
    q: Tensor,
    kv_cache: Tensor,
    keys: ContextKeys,
    unused: Tensor,
    out: Tensor,
    library: Library,
    sizes: PassSizes,
) -> None:
    library.trtllm_context(q, kv_cache, keys, out, sizes)
    out.masked_fill_(unused[:, None, None], 0.0)


@operation(writes=("kv_cache",))
def clear_slots(
    kv_cache: Tensor,  # [num_pages + 1, 2, num_kv_heads, page_size, head_dim]
    page_ids: Tensor,  # [n] int64; -1 is the last page, which is never read
    offsets: Tensor,  # [n] int64
) -> None:
    kv_cache[page_ids, :, :, offsets] = torch.zeros((), dtype=kv_cache.dtype, device=kv_cache.device)


@operation(lambda block_table, key_lens, page_size, num_pages: TensorSpec((num_pages,), torch.int32))
def pages_in_a_row(
    block_table: Tensor,  # [num_reqs, max_pages] int32
    key_lens: Tensor,  # [num_reqs] int32
    page_size: int,
    num_pages: int,  # of all requests, known on the host
) -> Tensor:  # [num_pages] int32
    """The pages of all requests, concatenated; the null page after the end of a table."""
    num_reqs, max_pages = block_table.shape
    counts = (key_lens + (page_size - 1)) // page_size
    ends = counts.cumsum(0)
    slots = torch.arange(num_pages, device=block_table.device)
    # For rows that are inactive, the device has fewer pages than the host plans for: the rest must be valid pages.
    request = torch.searchsorted(ends, slots, right=True).clamp(max=num_reqs - 1)
    column = slots - (ends - counts)[request]
    return torch.where(column < max_pages, block_table[request, column.clamp(max=max_pages - 1)], 0)


# --- the metadata of a step -----------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    """Neighbouring requests on one path. Fields that their path does not read are None."""

    path: str
    tokens: slice
    query_len: int  # of every request; 0 if they differ
    max_query_len: int
    max_seq_len: int  # a bound
    unused: Tensor  # [tokens] bool: unused draft slots
    key_lens: Tensor | None = None  # [num_reqs] int32
    block_table: Tensor | None = None  # [num_reqs, max_pages] int32
    mask: Tensor | None = None  # XQA with drafts: [num_reqs, query_len, 1] int32
    query_starts: Tensor | None = None  # [num_reqs + 1] int32, from 0
    paged_kv_indptr: Tensor | None = None  # [num_reqs + 1] int32, from 0
    pages: tuple[PlanPages, ...] | None = None  # one for each level of a cascade
    # Plans, created by the first layer of each shape.
    plans: dict[LayerShape, Planned] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    num_tokens: int  # the rest is padding
    decode: Part | None = None
    prefill: Part | None = None
    cascade: Part | None = None  # of the whole batch, replaces both
    seq_lens_cpu: Int32s | None = None  # exact
    unused_slots: UnusedSlots | None = None  # None: no draft can be missing

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part in (self.decode, self.prefill, self.cascade) if part is not None)


class _Range(NamedTuple):
    """A range of requests, with what the host knows of them."""

    reqs: slice
    tokens: slice
    query_len: int  # of every request; 0 if they differ
    key_lens_cpu: Int32s | None  # exact


class FlashInferBackend:
    """``decode_lens`` are all numbers of query tokens that the scheduler uses for decodes."""

    def __init__(
        self,
        paths: Paths,
        library: Library,
        page_size: int,
        max_num_reqs: int,
        decode_lens: Collection[int],
        device: torch.device,
    ) -> None:
        self.paths = paths.check()
        self.caps = Caps(DTYPES, host_lengths=paths.host_lengths, graph_support=paths.graph_support)
        self._library = library
        self._page_size = page_size
        self._decode_lens = frozenset(decode_lens)
        self._key_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._paged_kv_indptr = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)

    @property
    def exact_lengths(self) -> ExactLengths:
        """Which batches must be launched with no other step in flight."""
        return self.paths.exact_lengths

    def step_buffers(self) -> tuple[Tensor, ...]:
        return self._key_lens, self._paged_kv_indptr

    def starting_at(self, metadata: object, seq_starts: Tensor) -> NoReturn:
        raise RuntimeError(_NO_STARTS)

    def build(self, common: CommonAttentionMetadata) -> FlashInferMetadata:
        if common.seq_starts is not None or not common.is_causal:
            raise RuntimeError(_NO_STARTS)
        exact = common.num_computed_cpu
        has_cascade = exact is not None and common.num_common_pages > 0 and self.paths.cascade.path != "none"
        common, unused_slots = self._without_unused(common)
        starts, num_reqs = common.query_start_loc_cpu, common.num_reqs
        num_decodes, query_len = self._leading_decodes(starts)
        num_decode_tokens = num_decodes * query_len
        # Padding requests of a graph may have no tokens.
        num_prefills = num_reqs - num_decodes if common.num_actual_tokens > num_decode_tokens else 0
        needs = needs_of(self.paths, num_prefills, num_decodes, has_cascade, self.paths.context_parallel)
        lens = None
        if needs.seq_lens_cpu:
            if exact is None:
                raise ExactLengthsError("this batch is planned on the host and must be launched alone")
            lens = exact + np.diff(starts)
        if has_cascade:
            assert exact is not None and lens is not None
            cascade = self._cascade(common, common.num_common_pages, lens)
            return FlashInferMetadata(common.num_actual_tokens, None, None, cascade, lens, unused_slots)
        decode = prefill = None
        if num_decodes:
            reqs, tokens = slice(0, num_decodes), slice(0, num_decode_tokens)
            decode = self._decode(common, _Range(reqs, tokens, query_len, None if lens is None else lens[reqs]))
        if num_prefills:
            reqs, tokens = slice(num_decodes, num_reqs), slice(num_decode_tokens, common.num_actual_tokens)
            prefill = self._prefill(common, _Range(reqs, tokens, 0, None if lens is None else lens[reqs]))
        return FlashInferMetadata(common.num_actual_tokens, decode, prefill, None, lens, unused_slots)

    def _without_unused(self, common: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, UnusedSlots | None]:
        """The slots of unused drafts after a request's last token, and page tables without pages beyond them.

        Slots are cleared up to the end of the last used page. Pages after it may not belong to the request: the rest of
        its table row may be left from the row's previous request. The null page is read instead.
        """
        width, table, size = max(self._decode_lens), common.block_table, self._page_size
        if min(width, common.max_query_len) == 1:
            return common, None
        alive, planned = common.query_lens[:, None], common.query_start_loc.diff()[:, None]
        num_pages = (common.seq_lens[:, None] + (size - 1)) // size
        idx = torch.arange(width, dtype=torch.int32, device=table.device)
        at = common.seq_lens[:, None] + idx
        # A request that has stopped has length 0 and no last page: all its pages may be shared with others.
        is_unused = (idx < planned - alive) & (planned <= width) & (at < num_pages * size)
        page_ids = table.gather(1, (at // size).clamp(max=table.shape[1] - 1).long())
        slots = torch.where(is_unused, page_ids, -1).long().flatten(), (at % size).long().flatten()
        columns = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        return replace(common, block_table=torch.where(columns < num_pages, table, 0)), slots

    def _leading_decodes(self, starts: Int32s) -> tuple[int, int]:
        """How many leading requests have equal numbers of query tokens, as decodes do; and how many tokens that is."""
        lens = np.diff(starts)
        query_len = int(lens[0])
        if query_len not in self._decode_lens:
            return 0, 0
        others = np.flatnonzero(lens != query_len)
        return (int(others[0]) if len(others) else len(lens)), query_len

    def _decode(self, common: CommonAttentionMetadata, of: _Range) -> Part:
        path, query_len = self.paths.decode.path, of.query_len
        alive, seq_lens, table = common.query_lens[of.reqs], common.seq_lens[of.reqs], common.block_table[of.reqs]
        positions = torch.arange(query_len, dtype=torch.int32, device=alive.device)
        # A request near the context limit has unused slots beyond it.
        max_seq_len = int(common.seq_lens_cpu_upper_bound[of.reqs].max()) + query_len - 1
        unused = (positions >= alive[:, None]).reshape(-1)
        part = Part(path, of.tokens, query_len, query_len, max_seq_len, unused)
        key_lens = self._key_lens[of.reqs]
        if path == "xqa":
            # XQA does not support fewer keys than query tokens; the mask then hides the others.
            torch.clamp(seq_lens, min=query_len, out=key_lens)
            part.key_lens, part.block_table = key_lens, table
            if query_len > 1:
                part.mask = _visible_bits(seq_lens - alive - key_lens, positions)
            return part
        torch.add(seq_lens - alive, query_len, out=key_lens)
        if path == "native":
            part.pages = self._plan_pages(common, of, key_lens)
            return part
        part.key_lens = key_lens
        missing = -(-max_seq_len // self._page_size) - table.shape[1]
        part.block_table = pad(table, (0, missing)) if missing > 0 else table
        return part

    def _prefill(self, common: CommonAttentionMetadata, of: _Range) -> Part:
        path, key_lens = self.paths.prefill.path, self._key_lens[of.reqs]
        starts = common.query_start_loc[of.reqs.start : of.reqs.stop + 1]
        torch.add(common.seq_lens[of.reqs] - common.query_lens[of.reqs], starts.diff(), out=key_lens)
        host_starts = common.query_start_loc_cpu[of.reqs.start : of.reqs.stop + 1]
        bound = int(common.seq_lens_cpu_upper_bound[of.reqs].max())
        part = Part(path, of.tokens, 0, int(np.diff(host_starts).max()), bound, self._find_unused(common, of))
        if path == "native":
            part.pages = self._plan_pages(common, of, key_lens)
            return part
        part.key_lens, part.block_table = key_lens, common.block_table[of.reqs]
        part.query_starts = starts - starts[:1]
        part.paged_kv_indptr = self._cumulate_pages(key_lens)
        return part

    def _cumulate_pages(self, key_lens: Tensor) -> Tensor:
        """Recomputed in every step that reads it: the values of the step before belong to another batch."""
        indptr = self._paged_kv_indptr[: key_lens.shape[0] + 1]
        indptr[:1].zero_()
        num_pages = (key_lens + (self._page_size - 1)) // self._page_size
        torch.cumsum(num_pages, dim=0, dtype=torch.int32, out=indptr[1:])
        return indptr

    def _cascade(self, common: CommonAttentionMetadata, num_common: int, lens: Int32s) -> Part:
        """All requests together: the common pages as if they were one request's, then each with its own."""
        num_tokens, common_len = common.num_actual_tokens, num_common * self._page_size
        reqs, starts = slice(0, common.num_reqs), common.query_start_loc
        query_lens = np.diff(common.query_start_loc_cpu)
        assert (lens - query_lens >= common_len).all(), "a token of the step is within the common pages"
        key_lens = self._key_lens[reqs]
        ends = common.seq_lens[reqs] - common.query_lens[reqs] + starts[: common.num_reqs + 1].diff()
        torch.sub(ends, common_len, out=key_lens)
        of = _Range(reqs, slice(0, num_tokens), 0, lens - np.int32(common_len))
        first = PlanPages(
            torch.tensor([0, num_tokens], dtype=torch.int32),
            torch.tensor([0, num_common], dtype=torch.int32),
            torch.tensor([self._page_size], dtype=torch.int32),
            common.block_table[0, :num_common],
        )
        rest = self._plan_pages(common, of, key_lens, num_common)
        part = Part("cascade", of.tokens, 0, int(query_lens.max()), int(lens.max()), self._find_unused(common, of))
        part.pages = (first, *rest)
        return part

    def _plan_pages(
        self, common: CommonAttentionMetadata, of: _Range, key_lens: Tensor, first_page: int = 0
    ) -> tuple[PlanPages, ...]:
        assert of.key_lens_cpu is not None, "planning needs exact lengths"
        counts = -(-of.key_lens_cpu // self._page_size)
        page_starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=page_starts[1:])
        last = of.key_lens_cpu - (counts - 1) * self._page_size
        query_starts = common.query_start_loc_cpu[of.reqs.start : of.reqs.stop + 1]
        table = common.block_table[of.reqs, first_page:]
        page_ids = pages_in_a_row(table, key_lens, self._page_size, int(page_starts[-1]))
        host = (_host(query_starts - query_starts[0]), _host(page_starts), _host(last))
        return (PlanPages(*host, page_ids),)

    def _find_unused(self, common: CommonAttentionMetadata, of: _Range) -> Tensor:
        starts = common.query_start_loc
        tokens = torch.arange(of.tokens.start, of.tokens.stop, dtype=torch.int32, device=starts.device)
        ends = starts[of.reqs.start + 1 : of.reqs.stop + 1]
        request = torch.searchsorted(ends, tokens, right=True).clamp(max=ends.shape[0] - 1)
        return tokens >= (starts[of.reqs] + common.query_lens[of.reqs])[request]

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: FlashInferMetadata) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if metadata.unused_slots is not None:
            clear_slots(kv_cache, *metadata.unused_slots)
        for part in metadata.parts:
            self._run_part(layer, q[part.tokens], kv_cache, part, out[part.tokens])
        if metadata.num_tokens < q.shape[0]:
            out[metadata.num_tokens :].zero_()
        return out

    def _run_part(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, part: Part, out: Tensor) -> None:
        shape = LayerShape(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, self._page_size, layer.scale, layer.window, q.dtype
        )
        if part.path in ("native", "cascade"):
            assert part.pages is not None
            if shape not in part.plans:
                part.plans[shape] = self._plan(shape, part, part.pages)
            page_ids = tuple(level.page_ids for level in part.pages)
            flashinfer_planned(q, kv_cache, page_ids, part.unused, out, part.plans[shape])
            return
        assert part.block_table is not None and part.key_lens is not None
        if part.query_len:
            decoded = DecodeKeys(part.block_table, part.key_lens, part.mask)
            sizes = PassSizes(part.query_len, part.max_seq_len, layer.scale, shape.window_left)
            flashinfer_decode(q, kv_cache, decoded, part.unused, out, self._library, sizes)
            return
        assert part.query_starts is not None and part.paged_kv_indptr is not None
        keys = ContextKeys(part.block_table, part.key_lens, part.query_starts, part.paged_kv_indptr)
        sizes = PassSizes(part.max_query_len, part.max_seq_len, layer.scale, shape.window_left)
        flashinfer_context(q, kv_cache, keys, part.unused, out, self._library, sizes)

    def _plan(self, shape: LayerShape, part: Part, pages: tuple[PlanPages, ...]) -> Planned:
        if part.path == "cascade":
            return self._library.plan_cascade(shape, pages)
        if part.query_len == 1:
            return self._library.plan_decode(shape, pages[0])
        return self._library.plan_prefill("verify" if part.query_len else "prefill", shape, pages[0])


def _host(numbers: Int32s) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))


def _visible_bits(ahead: Tensor, positions: Tensor) -> Tensor:
    """Bit j is key j of the last query_len. A request's first token is ``ahead`` (negative) of their end."""
    query_len = positions.shape[0]
    seen = (positions + (ahead + (query_len + 1))[:, None]).clamp(0, query_len).long()
    bits = torch.bitwise_left_shift(torch.ones_like(seen), seen) - 1
    return bits.to(torch.int32)[:, :, None]
