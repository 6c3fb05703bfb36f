"""A FlashInfer that computes from exactly what it is given.

A wrong, stale or missing argument is a wrong result or an error. Plans are made on the host; kernels run where the
backend's operations run, and read the shape of pages off the cache.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.attention.backends.flashinfer_library import ContextKeys, DecodeKeys, LayerShape, PassSizes, PlanPages
from slipstream.attention.backends.flashinfer_paths import Choice, Paths


def paths_of(prefill: str, decode: str, parallel: bool = False) -> Paths:
    return Paths(Choice(prefill, ""), Choice(decode, ""), Choice("native", ""), parallel)  # type: ignore[arg-type]


def attend(q: Tensor, kv_cache: Tensor, page_ids: Tensor, visible: Tensor, scale: float) -> Tensor:
    """[n, heads, dim] over the visible keys, a row of ``visible`` for each; NaN for who sees none.

    As in a kernel, what one of the rows sees is read for all of them: a weight of zero does not remove a NaN.
    """
    _, _, num_kv_heads, page_size, head_dim = kv_cache.shape
    slots = visible.any(0).nonzero()[:, 0]
    keys, values = kv_cache[page_ids[slots // page_size].long(), :, :, slots % page_size].double().unbind(1)
    query = q.double().view(len(q), num_kv_heads, -1, head_dim)
    scores = torch.einsum("nhgd,khd->nhgk", query, keys) * scale
    scores = scores.masked_fill(~visible[:, slots][:, None, None], -torch.inf)
    return torch.einsum("nhgk,khd->nhgd", torch.softmax(scores, dim=-1), values).reshape(q.shape).to(q.dtype)


def causal(num_query: int, num_keys: int, window_left: int) -> Tensor:
    position = torch.arange(num_keys - num_query, num_keys)[:, None]
    key = torch.arange(num_keys)[None]
    seen = key <= position
    return seen & (key >= position - window_left) if window_left >= 0 else seen


@dataclass(frozen=True)
class FakePlan:
    """What the host said when it planned; the device adds pages, queries and keys."""

    shape: LayerShape
    levels: tuple[tuple[list[int], list[int], list[int]], ...]

    def visible(self, level: int, query_len: int, num_keys: int) -> Tensor:
        if level == len(self.levels) - 1:
            return causal(query_len, num_keys, self.shape.window_left)
        return torch.ones(query_len, num_keys, dtype=torch.bool)

    def run(self, q: Tensor, kv_cache: Tensor, page_ids: tuple[Tensor, ...], out: Tensor) -> None:
        page_size = kv_cache.shape[3]
        assert len(q) == self.levels[-1][0][-1]
        for begin, end in itertools.pairwise(self.levels[-1][0]):
            seen: list[Tensor] = []
            pages: list[Tensor] = []
            for level, (query_starts, page_starts, last_lens) in enumerate(self.levels):
                # The request of this level that has the token, as its query_starts say.
                j = next(j for j in range(len(last_lens)) if query_starts[j] <= begin < max(query_starts[j + 1], 1))
                first, stop = page_starts[j], page_starts[j + 1]
                assert stop <= len(page_ids[level])
                num_keys = (stop - first - 1) * page_size + last_lens[j]
                visible = self.visible(level, end - begin, num_keys)
                # Pages are whole in the row of all pages, so that levels can follow each other.
                missing = (stop - first) * page_size - num_keys
                seen.append(torch.nn.functional.pad(visible, (0, missing)))
                pages.append(page_ids[level][first:stop])
            out[begin:end] = attend(q[begin:end], kv_cache, torch.cat(pages), torch.cat(seen, 1), self.shape.scale)


class FakeLibrary:
    def __init__(self, decode: str) -> None:
        self._decode = decode
        self.calls: list[str] = []

    def _plan(self, name: str, shape: LayerShape, *levels: PlanPages) -> FakePlan:
        self.calls.append(name)
        host = tuple((p.query_starts.tolist(), p.page_starts.tolist(), p.last_page_lens.tolist()) for p in levels)
        for query_starts, page_starts, last_lens in host:
            assert query_starts[0] == page_starts[0] == 0
            assert len(query_starts) == len(page_starts) == len(last_lens) + 1
            assert all(0 < n <= shape.page_size for n in last_lens)
        return FakePlan(shape, host)

    def plan_decode(self, shape: LayerShape, pages: PlanPages) -> FakePlan:
        assert pages.query_starts.diff().eq(1).all()
        return self._plan("plan_decode", shape, pages)

    def plan_prefill(self, role: str, shape: LayerShape, pages: PlanPages) -> FakePlan:
        return self._plan(f"plan_{role}", shape, pages)

    def plan_cascade(self, shape: LayerShape, levels: tuple[PlanPages, ...]) -> FakePlan:
        return self._plan("plan_cascade", shape, *levels)

    def trtllm_decode(self, q: Tensor, kv_cache: Tensor, keys: DecodeKeys, out: Tensor, sizes: PassSizes) -> None:
        (block_table, key_lens, mask), (query_len, max_seq_len, scale, window_left) = keys, sizes
        assert (mask is not None) == (self._decode == "xqa" and query_len > 1)
        for i, num_keys in enumerate(key_lens.tolist()):
            tokens = slice(i * query_len, (i + 1) * query_len)
            assert query_len <= num_keys <= max_seq_len
            assert num_keys <= block_table.shape[1] * kv_cache.shape[3], "reads past the end of the table"
            visible = causal(query_len, num_keys, window_left)
            if mask is not None:
                assert window_left == -1
                bits = mask[i] >> torch.arange(query_len) & 1
                visible = torch.cat([torch.ones(query_len, num_keys - query_len), bits], 1) > 0
            out[tokens] = attend(q[tokens], kv_cache, block_table[i], visible, scale)

    def trtllm_context(self, q: Tensor, kv_cache: Tensor, keys: ContextKeys, out: Tensor, sizes: PassSizes) -> None:
        block_table, key_lens, query_starts, page_starts = keys
        max_query_len, max_seq_len, scale, window_left = sizes
        page_size = kv_cache.shape[3]
        for i, (begin, end) in enumerate(itertools.pairwise(query_starts.tolist())):
            # A row's pages lie where the counts before it say, as in a kernel that walks them in a row.
            first, stop = page_starts[i : i + 2].tolist()
            before = int(((key_lens[:i] + page_size - 1) // page_size).sum())
            num_keys = min(int(key_lens[i]), (stop - first) * page_size)
            assert end - begin <= max_query_len and num_keys <= max_seq_len
            if end > begin and num_keys > 0:
                pages = block_table[i].roll(before - first)
                visible = causal(end - begin, num_keys, window_left)
                out[begin:end] = attend(q[begin:end], kv_cache, pages, visible, scale)
