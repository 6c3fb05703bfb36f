"""A step's forward pass in two halves, one after the other: the batch's metadata is cut at a token.

A cut within a request makes two chunks of its share, of which the second reads what the first has cached. What the
host knows are bounds, and they are sliced and cut as such: nothing here reads a length from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.cache_spec import CacheSpec

# Where a batch is cut: a number of tokens, or None for a step in one piece.
ChooseSplit = Callable[[CommonAttentionMetadata], int | None]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One half: which requests and tokens of the batch it has, and its own metadata."""

    requests: slice
    tokens: slice
    attention: CommonAttentionMetadata


def split_batch(common: CommonAttentionMetadata, at: int, refusal: str = "") -> tuple[MicroBatch, MicroBatch]:
    """The tokens before ``at``, and the others. The batch has no padding but unused slots of drafts.

    ``refusal`` is why no request may be cut.
    """
    starts, num_reqs = common.query_start_loc_cpu, common.num_reqs
    if not 0 < at < common.num_actual_tokens:
        raise ValueError(f"a batch of {common.num_actual_tokens} tokens has no second half from token {at} on")
    first_end = int(np.searchsorted(starts, at, side="left"))  # requests that begin before the cut
    is_within = int(starts[first_end]) > at
    if is_within and refusal:
        raise ValueError(f"a batch cannot be cut within a request: {refusal}")
    first = _slice(common, 0, first_end, slice(0, at))
    second = _slice(common, first_end - is_within, num_reqs, slice(at, common.num_actual_tokens))
    if is_within:
        first, second = _cut_request(first, second, at - int(starts[first_end - 1]), int(starts[first_end]) - at)
    return first, second


def _slice(common: CommonAttentionMetadata, begin: int, end: int, tokens: slice) -> MicroBatch:
    """Requests that all of these tokens belong to, as if none was cut."""
    own, num_tokens = slice(begin, end), tokens.stop - tokens.start
    starts_cpu = (common.query_start_loc_cpu[begin : end + 1] - tokens.start).clip(0, num_tokens).astype(np.int32)
    starts = (common.query_start_loc[begin : end + 1] - tokens.start).clamp(0, num_tokens)

    def part(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[own]

    def host_part(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[own].copy()

    attention = replace(
        common,
        num_reqs=end - begin,
        num_actual_tokens=num_tokens,
        max_query_len=int(np.diff(starts_cpu).max()),
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        query_lens=common.query_lens[own],
        seq_lens=common.seq_lens[own],
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[own].copy(),
        block_table=common.block_table[own],
        slot_mapping=common.slot_mapping[tokens],
        seq_starts=part(common.seq_starts),
        num_computed_cpu=host_part(common.num_computed_cpu),
        batch_rows=part(common.batch_rows),
        num_drafts_cpu=host_part(common.num_drafts_cpu),
        num_decodes=min(max(common.num_decodes - begin, 0), end - begin),
    )
    return MicroBatch(own, tokens, attention)


def _cut_request(
    first: MicroBatch, second: MicroBatch, num_before: int, tokens_skipped: int
) -> tuple[MicroBatch, MicroBatch]:
    """The last request of the first half is the first of the second: ``num_before`` and ``tokens_skipped`` tokens."""
    before, after = first.attention, second.attention
    # On the device: of the request's tokens in use, those before the cut come first.
    query_lens, seq_lens = before.query_lens.clone(), before.seq_lens.clone()
    query_lens[-1:].clamp_(max=num_before)
    num_left = before.query_lens[-1:] - query_lens[-1:]
    seq_lens[-1:] -= num_left
    lens_after = after.query_lens.clone()
    lens_after[:1] = num_left
    # On the host: unused slots of drafts may be among the skipped tokens, and the length without them is no shorter.
    num_drafts = 0 if before.num_drafts_cpu is None else int(before.num_drafts_cpu[-1])
    bounds = before.seq_lens_cpu_upper_bound
    bounds[-1] -= max(0, tokens_skipped - num_drafts)
    drafts_before, drafts_after = before.num_drafts_cpu, after.num_drafts_cpu
    if drafts_before is not None and drafts_after is not None:
        drafts_after[0] = min(num_drafts, tokens_skipped)
        drafts_before[-1] = num_drafts - drafts_after[0]
    if after.num_computed_cpu is not None:
        after.num_computed_cpu[0] += num_before
    # A decode that is cut is none any more: the last of the first half, and before all of the second.
    decodes_before = min(before.num_decodes, before.num_reqs - 1)
    # A request without tokens left does not run in the second half, whatever its length.
    lengths_after = after.seq_lens.clone()
    lengths_after[:1] = torch.where(num_left > 0, after.seq_lens[:1], 0)
    return (
        replace(
            first,
            attention=replace(before, query_lens=query_lens, seq_lens=seq_lens, num_decodes=decodes_before),
        ),
        replace(second, attention=replace(after, query_lens=lens_after, seq_lens=lengths_after, num_decodes=0)),
    )


def whole_prompt_reason(specs: tuple[CacheSpec, ...]) -> str:
    """Why no step may be cut within a request; empty: it may be."""
    return next((spec.whole_prompts for spec in specs if spec.whole_prompts), "")


class Splitter:
    """Chooses where steps are cut. By default in the middle, from so many tokens on."""

    def __init__(self, specs: tuple[CacheSpec, ...], least_tokens: int) -> None:
        self.refusal, self._least_tokens = whole_prompt_reason(specs), least_tokens
        self.choose: ChooseSplit = self._choose_middle

    def _choose_middle(self, common: CommonAttentionMetadata) -> int | None:
        return common.num_actual_tokens // 2 if common.num_actual_tokens >= self._least_tokens else None

    def split(self, common: CommonAttentionMetadata) -> tuple[MicroBatch, MicroBatch] | None:
        """The halves of a batch; None where it stays whole."""
        if common.num_computed_cpu is not None:
            return None  # what attention plans on the host is staged once a step
        at = self.choose(common)
        if at is not None and self.refusal:
            # To the nearest request that begins.
            starts = common.query_start_loc_cpu
            at = int(starts[np.abs(starts - at).argmin()])
        return split_batch(common, at, self.refusal) if at is not None and 0 < at < common.num_actual_tokens else None
