"""Request rows: the persistent device state of every running request.

All fields live in one flat int32 store, so that one scatter applies any set of changes. A row belongs to a request for
as long as it runs; the last row is scratch: it never runs, and padding points at it. The store also holds the
composition of the batch (which rows, how many tokens each), so that an unchanged batch needs no transfer at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.runner.staging import Int32s, StagedWrites
from slipstream.sampling.sampler import SamplingRows
from slipstream.speculate.place_host_drafts import NUM_HEADER_COLUMNS, place_host_drafts
from slipstream.speculate.speculator import DraftRows
from slipstream.types import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_DEVICE_STOP_IDS,
    MAX_LOGIT_BIAS,
    HostDraft,
    PageDiff,
    RowInit,
    RowStatus,
)

_INT_FIELDS = (
    "num_computed",
    "num_tokens",
    "num_drafts",
    "max_drafts",
    "draft_start",
    "draft_end",
    "ran",
    "prompt_len",
    "min_total",
    "max_total",
    "status",
    "top_k",
    "choice",
    "num_bias",
    "num_bad_words",
)
# Where a request's tokens, its logits and its tokens in a pass of the drafter begin.
_BATCH_OFFSETS = ("query_start_loc", "logit_start_loc", "draft_start_loc")
_FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
_WIDE_FIELDS = {
    "seeds": (2,),
    "stop_ids": (MAX_DEVICE_STOP_IDS,),
    "bias_ids": (MAX_LOGIT_BIAS,),
    "bias_values": (MAX_LOGIT_BIAS,),
    "bad_words": (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
}


_HOST_DRAFTS = "host_drafts"


class RequestRows:
    def __init__(self, config: EngineConfig, device: Device) -> None:
        limits = config.scheduler
        self.num_rows = limits.max_num_seqs + 1
        self.scratch_row = limits.max_num_seqs
        self.max_pages = -(-limits.max_model_len // config.cache.page_size)
        self._layout: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._size = 0
        for name in (*_INT_FIELDS, *_FLOAT_FIELDS):
            self._reserve(name, self.num_rows)
        for name, shape in _WIDE_FIELDS.items():
            self._reserve(name, self.num_rows, *shape)
        self._reserve("page_table", self.num_rows, self.max_pages)
        self._reserve("token_ids", self.num_rows, limits.max_model_len)
        self._reserve("batch_rows", limits.max_num_seqs)
        for name in _BATCH_OFFSETS:
            self._reserve(name, limits.max_num_seqs + 1)
        if limits.needs.host_drafts:
            self._reserve(_HOST_DRAFTS, self.num_rows, NUM_HEADER_COLUMNS + _most_host_drafts(config))
        self._field_starts = np.array([self._layout[name][0] for name in (*_INT_FIELDS, *_FLOAT_FIELDS)])

        self.store = torch.zeros(self._size, dtype=torch.int32, device=device.torch_device)
        self.num_computed = self._field("num_computed")
        self.num_tokens = self._field("num_tokens")
        self.num_drafts = self._field("num_drafts")
        self.max_total = self._field("max_total")
        self.status = self._field("status")
        self.stop_ids = self._field("stop_ids")
        self.page_table = self._field("page_table")
        self.token_ids = self._field("token_ids")
        self.batch_rows = self._field("batch_rows")
        self.query_start_loc = self._field("query_start_loc")
        self.logit_start_loc = self._field("logit_start_loc")
        self.draft_start_loc = self._field("draft_start_loc")
        floats = {name: self._field(name).view(torch.float32) for name in (*_FLOAT_FIELDS, "bias_values")}
        ints = {f.name: self._field(f.name) for f in fields(SamplingRows) if f.name not in floats}
        self.sampling = SamplingRows(**floats, **ints)
        own = {f.name: self._field(f.name) for f in fields(DraftRows) if f.name not in floats}
        self.drafting = DraftRows(**own, temperature=floats["temperature"])
        self.host_drafts = self._field(_HOST_DRAFTS) if limits.needs.host_drafts else None
        self.status.fill_(int(RowStatus.INERT))
        self.batch_rows.fill_(self.scratch_row)

        # What the device holds of the batch composition, to stage differences only.
        nothing = np.zeros(1, dtype=np.int32)
        self._batch_mirror = self.batch_columns(nothing[:0], *[nothing] * len(_BATCH_OFFSETS))
        self._num_drafts = config.num_drafts
        self._staged = StagedWrites(device, self._capacity(config), config.steps_in_flight + 1)

    def _reserve(self, name: str, *shape: int) -> None:
        self._layout[name] = (self._size, shape)
        self._size += math.prod(shape)

    def _field(self, name: str) -> Tensor:
        start, shape = self._layout[name]
        return self.store[start : start + math.prod(shape)].view(shape)

    def _capacity(self, config: EngineConfig) -> int:
        """Most values one step can stage; the scheduler admits at most max_model_len prompt tokens a step."""
        wide = sum(math.prod(shape) for shape in _WIDE_FIELDS.values())
        a_row = len(_INT_FIELDS) + len(_FLOAT_FIELDS) + wide
        pages = min(config.cache.num_pages, self.num_rows * self.max_pages)
        if config.scheduler.needs.host_drafts:
            a_row += NUM_HEADER_COLUMNS + _most_host_drafts(config)
        return config.scheduler.max_model_len + pages + self.num_rows * (a_row + 1 + len(_BATCH_OFFSETS))

    def stage_init(self, init: RowInit) -> None:
        """A request moves in: every field of its row is written but the page table, which comes as diffs."""
        row, request, params = init.row, init.request, init.request.params
        prompt_len = len(request.prompt_token_ids)
        bias, words = params.logit_bias or {}, request.bad_word_ids
        floats = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition": params.repetition_penalty,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
        }
        numbers = {
            "num_computed": init.num_computed,
            "num_tokens": len(init.token_ids),
            "num_drafts": 0,
            "max_drafts": request.num_drafts(self._num_drafts),
            "draft_start": init.draft_start,
            "draft_end": init.num_computed,
            "ran": 0,
            "prompt_len": prompt_len,
            # A least length beyond the limit is the limit: the row ends there.
            "min_total": min(prompt_len + params.min_tokens, request.max_total_tokens),
            "max_total": request.max_total_tokens,
            "status": int(RowStatus.RUNNING),
            "top_k": min(params.top_k or 0, 2**31 - 1),
            "choice": request.choice,
            "num_bias": len(bias),
            "num_bad_words": len(words),
        }
        resolved = [value for name in _FLOAT_FIELDS if (value := floats[name]) is not None]
        assert len(resolved) == len(_FLOAT_FIELDS), f"not resolved: {floats}"
        values = [*(numbers[name] for name in _INT_FIELDS), *_float_bits(resolved).tolist()]
        self._staged.put_at(self._field_starts + row, np.array(values, dtype=np.int32))
        assert params.seed is not None
        self._put("seeds", row, np.array([params.seed], dtype=np.uint64).view(np.int32))
        stop_ids = request.stop_token_ids[:MAX_DEVICE_STOP_IDS]
        self._put("stop_ids", row, [*stop_ids, *[-1] * (MAX_DEVICE_STOP_IDS - len(stop_ids))])
        if bias:
            self._put("bias_ids", row, list(bias))
            self._put("bias_values", row, _float_bits(list(bias.values())))
        if words:
            self._put("bad_words", row, [t for word in words for t in _right_aligned(word)])
        self._put("token_ids", row, init.token_ids)
        if self.host_drafts is not None:
            self._put(_HOST_DRAFTS, row, [0, 0])

    def stage_pages(self, diffs: Sequence[PageDiff]) -> None:
        start, (_, width) = self._layout["page_table"]
        starts = [start + diff.row * width + diff.first_idx for diff in diffs]
        lengths = [len(diff.page_ids) for diff in diffs]
        page_ids = np.array([page_id for diff in diffs for page_id in diff.page_ids], dtype=np.int32)
        # Of every page, how far it stands behind the first of its diff.
        behind = np.arange(len(page_ids)) - np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        self._staged.put_at(np.repeat(starts, lengths) + behind, page_ids)

    def stage_host_drafts(self, drafts: Sequence[HostDraft]) -> None:
        for draft in drafts:
            self._put(_HOST_DRAFTS, draft.row, [draft.first_idx, len(draft.token_ids), *draft.token_ids])

    def place_host_drafts(self) -> None:
        """Queue that drafts which have been staged move behind their rows' tokens."""
        assert self.host_drafts is not None
        rows = self.drafting
        place_host_drafts(
            *(self.host_drafts, rows.num_computed, rows.num_tokens, rows.max_drafts, rows.max_total, rows.status),
            *(self._num_drafts, rows.token_ids, rows.num_drafts),
        )

    def batch_columns(self, rows: Int32s, *offsets: Int32s) -> Int32s:
        """What the device is told of a batch of these rows, columns one behind the other; behind each is padding.

        ``offsets`` are those of ``_BATCH_OFFSETS``; the last may be left out where nobody drafts.
        """
        n, most = len(rows), self.num_rows - 1
        columns = np.zeros(most + len(_BATCH_OFFSETS) * (most + 1), dtype=np.int32)
        columns[:n], columns[n:most] = rows, self.scratch_row
        for idx, starts in enumerate(offsets):
            own = columns[most + idx * (most + 1) :][: most + 1]
            own[: n + 1], own[n + 1 :] = starts, starts[-1]
        return columns

    def stage_batch(self, columns: Int32s) -> None:
        """Make this the batch. They stand in the store as they stand there; what has not changed is not sent."""
        changed = np.flatnonzero(columns != self._batch_mirror)
        if len(changed):
            self._staged.put_at(self._layout["batch_rows"][0] + changed, columns[changed])
            self._batch_mirror = columns

    def flush(self) -> int:
        return self._staged.flush(self.store)

    def _put(self, name: str, row: int, values: Sequence[int] | Int32s) -> None:
        start, shape = self._layout[name]
        self._staged.put(start + row * math.prod(shape[1:]), np.asarray(values, dtype=np.int32))


def _most_host_drafts(config: EngineConfig) -> int:
    """Those that a step checks, and tokens that the steps before it may bring while they are in flight."""
    return config.num_drafts + (config.steps_in_flight - 1) * (1 + config.num_drafts)


def _float_bits(values: Sequence[float]) -> Int32s:
    return np.array(values, dtype=np.float32).view(np.int32)


def _right_aligned(word: tuple[int, ...]) -> list[int]:
    return [-1] * (MAX_BAD_WORD_TOKENS - len(word)) + list(word)
