"""Request rows: the persistent device state of every running request.

All fields are in one flat int32 store, so that one scatter applies any set of changes. A row belongs to a request while
it runs; the last row is the scratch row: it never runs, and padding points at it. The store also holds the composition
of the batch (rows and their numbers of tokens), so that an unchanged batch needs no transfer at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.kernels.request_rows import EncoderPages, RowState
from slipstream.plan import HostDraft, PageDiff, RowInit, RowStatus
from slipstream.request import MAX_DEVICE_STOP_IDS, Request
from slipstream.runner.staging import Int32s, StagedWrites
from slipstream.sampling import registry
from slipstream.sampling.operation import SamplingRows
from slipstream.speculate.place_host_drafts import NUM_HEADER_COLUMNS, place_host_drafts

_INT_FIELDS = (
    "num_computed",
    "num_tokens",
    "num_drafts",
    "max_drafts",
    "draft_start",
    "draft_end",
    "step_start",
    "prompt_len",
    "max_total",
    "status",
    "choice",
    "encoder_len",
)
# The first index of a request's tokens, of its logits, and of its tokens in a pass of the drafter.
_BATCH_OFFSETS = ("query_start_loc", "logit_start_loc", "draft_start_loc")
_WIDE_FIELDS = {"seeds": (2,), "stop_ids": (MAX_DEVICE_STOP_IDS,)}


_HOST_DRAFTS = "host_drafts"


class RequestRows:
    def __init__(self, config: EngineConfig, device: Device, more: Sequence[Column] = ()) -> None:
        """``more`` columns than those of the sampling operations: of the step head and the model."""
        limits = config.scheduler
        self.num_rows = limits.max_num_seqs + 1
        self.scratch_row = limits.max_num_seqs
        self.max_pages = -(-limits.max_model_len // config.cache.page_size)
        self._max_encoder_pages = -(-config.model.max_encoder_entries // config.cache.page_size)
        self._layout: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._size = 0
        operations = registry.operations()
        columns = [*(column for operation in operations for column in operation.columns), *more]
        self._int_columns = [column for column in columns if not column.shape and column.dtype == "int32"]
        self._float_columns = [column for column in columns if not column.shape and column.dtype == "float32"]
        self._wide_columns = [column for column in columns if column.shape]
        # Fields that are staged together for a row.
        numbers = (*_INT_FIELDS, *(column.name for column in (*self._int_columns, *self._float_columns)))
        for name in numbers:
            self._reserve(name, self.num_rows)
        wide_fields = {**_WIDE_FIELDS, **{column.name: column.shape for column in self._wide_columns}}
        for name, shape in wide_fields.items():
            self._reserve(name, self.num_rows, *shape)
        self._row_size = len(numbers) + sum(math.prod(shape) for shape in wide_fields.values())
        self._reserve("page_table", self.num_rows, self.max_pages)
        self._reserve("encoder_page_table", self.num_rows, self._max_encoder_pages)
        self._reserve("token_ids", self.num_rows, limits.max_model_len)
        self._reserve("batch_rows", limits.max_num_seqs)
        for name in _BATCH_OFFSETS:
            self._reserve(name, limits.max_num_seqs + 1)
        if limits.needs.host_drafts:
            self._reserve(_HOST_DRAFTS, self.num_rows, NUM_HEADER_COLUMNS + _most_host_drafts(config))
        self._field_starts = np.array([self._layout[name][0] for name in numbers])

        self.store = torch.zeros(self._size, dtype=torch.int32, device=device.torch_device)
        self.num_computed = self._field("num_computed")
        self.num_tokens = self._field("num_tokens")
        self.num_drafts = self._field("num_drafts")
        self.max_total = self._field("max_total")
        self.status = self._field("status")
        self.stop_ids = self._field("stop_ids")
        self.page_table = self._field("page_table")
        # Where each row's encoder output is; None for a model without an encoder.
        self.encoder: EncoderPages | None = None
        if self._max_encoder_pages:
            self.encoder = EncoderPages(self._field("encoder_page_table"), self._field("encoder_len"))
        self.token_ids = self._field("token_ids")
        self.batch_rows = self._field("batch_rows")
        self.query_start_loc = self._field("query_start_loc")
        self.logit_start_loc = self._field("logit_start_loc")
        self.draft_start_loc = self._field("draft_start_loc")
        by_name = {column.name: self._column(column) for column in columns}
        self.columns = by_name
        self.prompt_len = self._field("prompt_len")
        temperature = by_name["temperature"]
        self.sampling = SamplingRows(
            temperature=temperature,
            seeds=self._field("seeds"),
            choice=self._field("choice"),
            stop_ids=self.stop_ids,
            prompt_len=self.prompt_len,
            token_ids=self.token_ids,
            columns=by_name,
            operations=operations,
            exact=config.exact,
        )
        own = {f.name: self._field(f.name) for f in fields(RowState) if f.name != "temperature"}
        self.state = RowState(**own, temperature=temperature)
        self.host_drafts = self._field(_HOST_DRAFTS) if limits.needs.host_drafts else None
        self.status.fill_(int(RowStatus.INERT))
        self.batch_rows.fill_(self.scratch_row)

        # The batch composition on the device, to stage differences only.
        nothing = np.zeros(1, dtype=np.int32)
        self._batch_mirror = self.batch_columns(nothing[:0], *[nothing] * len(_BATCH_OFFSETS))
        self._num_drafts = config.num_drafts
        self._staged = StagedWrites(device, self._capacity(config), config.steps_in_flight + 1)

    def _reserve(self, name: str, *shape: int) -> None:
        if name in self._layout:
            raise ValueError(f"two columns of the request rows are called {name}")
        self._layout[name] = (self._size, shape)
        self._size += math.prod(shape)

    def _field(self, name: str) -> Tensor:
        start, shape = self._layout[name]
        return self.store[start : start + math.prod(shape)].view(shape)

    def _column(self, column: Column) -> Tensor:
        values = self._field(column.name)
        return values.view(torch.float32) if column.dtype == "float32" else values

    def _capacity(self, config: EngineConfig) -> int:
        """Upper bound of the values staged per step: it admits requests of so many tokens at most."""
        pages = min(config.cache.num_pages, self.num_rows * self.max_pages)
        row_size = self._row_size + self._max_encoder_pages
        if config.scheduler.needs.host_drafts:
            row_size += NUM_HEADER_COLUMNS + _most_host_drafts(config)
        return config.scheduler.max_staged_tokens + pages + self.num_rows * (row_size + 1 + len(_BATCH_OFFSETS))

    def stage_init(self, init: RowInit) -> None:
        """Assign a row to a request: writes every field but the page table, which comes as diffs."""
        row, request, params = init.row, init.request, init.request.params
        numbers = {
            "num_computed": init.num_computed,
            "num_tokens": len(init.token_ids),
            "num_drafts": 0,
            "max_drafts": request.num_drafts(self._num_drafts),
            "draft_start": init.draft_start,
            "draft_end": init.num_computed,
            "step_start": 0,
            "prompt_len": len(request.prompt_token_ids),
            "max_total": request.max_total_tokens,
            "status": int(RowStatus.RUNNING),
            "choice": request.choice,
            "encoder_len": request.num_encoder_entries,
        }
        self._stage_numbers(row, [numbers[name] for name in _INT_FIELDS], request)
        assert params.seed is not None
        self._put("seeds", row, np.array([params.seed], dtype=np.uint64).view(np.int32))
        stop_ids = request.stop_token_ids[:MAX_DEVICE_STOP_IDS]
        self._put("stop_ids", row, [*stop_ids, *[-1] * (MAX_DEVICE_STOP_IDS - len(stop_ids))])
        for name, value, dtype, shape in self._wide_columns:
            if values := value(request):
                assert len(values) <= math.prod(shape), f"{name} has {len(values)} values"
                self._put(name, row, _float_bits(values) if dtype == "float32" else values)
        self._put("token_ids", row, init.token_ids)
        if init.encoder_page_ids:
            self._put("encoder_page_table", row, init.encoder_page_ids)
        if self.host_drafts is not None:
            self._put(_HOST_DRAFTS, row, [0, 0])

    def _stage_numbers(self, row: int, numbers: list[int], request: Request) -> None:
        """Fields of one number, the row's own and those of the sampling operations, in one write."""
        floats = [value(request) for _, value, *_ in self._float_columns]
        assert None not in floats, f"{self._float_columns[floats.index(None)].name} is not resolved"
        values = [*numbers, *[value(request) for _, value, *_ in self._int_columns], *_float_bits(floats).tolist()]
        self._staged.put_at(self._field_starts + row, np.array(values, dtype=np.int32))

    def stage_pages(self, diffs: Sequence[PageDiff]) -> None:
        start, (_, width) = self._layout["page_table"]
        starts = [start + diff.row * width + diff.first_idx for diff in diffs]
        lengths = [len(diff.page_ids) for diff in diffs]
        page_ids = np.array([page_id for diff in diffs for page_id in diff.page_ids], dtype=np.int32)
        # The offset of every page from the first of its diff.
        offsets = np.arange(len(page_ids)) - np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        self._staged.put_at(np.repeat(starts, lengths) + offsets, page_ids)

    def stage_host_drafts(self, drafts: Sequence[HostDraft]) -> None:
        for draft in drafts:
            self._put(_HOST_DRAFTS, draft.row, [draft.first_idx, len(draft.token_ids), *draft.token_ids])

    def place_host_drafts(self) -> None:
        """Queue that staged drafts move after their rows' tokens."""
        assert self.host_drafts is not None
        place_host_drafts(self.host_drafts, self.state, self._num_drafts)

    def batch_columns(self, rows: Int32s, *offsets: Int32s) -> Int32s:
        """A batch of these rows as the store holds it: columns one after another, each followed by padding.

        ``offsets`` are those of ``_BATCH_OFFSETS``; the last may be left out if the engine does not draft.
        """
        n, most = len(rows), self.num_rows - 1
        columns = np.zeros(most + len(_BATCH_OFFSETS) * (most + 1), dtype=np.int32)
        columns[:n], columns[n:most] = rows, self.scratch_row
        for idx, starts in enumerate(offsets):
            own = columns[most + idx * (most + 1) :][: most + 1]
            own[: n + 1], own[n + 1 :] = starts, starts[-1]
        return columns

    def stage_batch(self, columns: Int32s) -> None:
        """Make this the batch. The columns have the store's layout; unchanged ones are not sent."""
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
    """Drafts that a step verifies, and tokens that steps in flight may add before it."""
    return config.num_drafts + (config.steps_in_flight - 1) * (1 + config.num_drafts)


def _float_bits(values: Sequence[float]) -> Int32s:
    return np.array(values, dtype=np.float32).view(np.int32)
