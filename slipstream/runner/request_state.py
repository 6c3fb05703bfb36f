"""Request rows: the persistent device state of every running request.

All fields live in one flat int32 store, so that one scatter applies any set of changes. A row belongs to a request for
as long as it runs; the last row is scratch: it never runs, and padding points at it. The store also holds the
composition of the batch (which rows, how many tokens each), so that an unchanged batch needs no transfer at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.runner.staging import Int32s, StagedWrites
from slipstream.sampling.sampler import SamplingRows
from slipstream.types import PageDiff, RowInit, RowStatus

# Stop ids the device checks by itself; the host checks the rest of a longer list when it collects.
MAX_DEVICE_STOP_IDS = 8
_SCALAR_FIELDS = ("num_computed", "num_tokens", "max_total", "status", "temperature", "top_k", "top_p")


class RequestRows:
    def __init__(self, config: EngineConfig, device: Device) -> None:
        limits = config.scheduler
        self.num_rows = limits.max_num_seqs + 1
        self.scratch_row = limits.max_num_seqs
        self.max_pages = -(-limits.max_model_len // config.cache.page_size)
        self._layout: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._size = 0
        for name in _SCALAR_FIELDS:
            self._reserve(name, self.num_rows)
        self._reserve("seeds", self.num_rows, 2)
        self._reserve("stop_ids", self.num_rows, MAX_DEVICE_STOP_IDS)
        self._reserve("page_table", self.num_rows, self.max_pages)
        self._reserve("token_ids", self.num_rows, limits.max_model_len)
        self._reserve("batch_rows", limits.max_num_seqs)
        self._reserve("query_start_loc", limits.max_num_seqs + 1)

        self.store = torch.zeros(self._size, dtype=torch.int32, device=device.torch_device)
        self.num_computed = self._field("num_computed")
        self.num_tokens = self._field("num_tokens")
        self.max_total = self._field("max_total")
        self.status = self._field("status")
        self.stop_ids = self._field("stop_ids")
        self.page_table = self._field("page_table")
        self.token_ids = self._field("token_ids")
        self.batch_rows = self._field("batch_rows")
        self.query_start_loc = self._field("query_start_loc")
        self.sampling = SamplingRows(
            temperature=self._field("temperature").view(torch.float32),
            top_k=self._field("top_k"),
            top_p=self._field("top_p").view(torch.float32),
            seeds=self._field("seeds"),
            num_tokens=self.num_tokens,
        )
        self.status.fill_(int(RowStatus.INERT))
        self.batch_rows.fill_(self.scratch_row)

        # What the device holds of the batch composition, to stage differences only.
        self._batch_rows_mirror = np.full(limits.max_num_seqs, self.scratch_row, dtype=np.int32)
        self._query_start_mirror = np.zeros(limits.max_num_seqs + 1, dtype=np.int32)
        self._staged = StagedWrites(device, self._capacity(config), config.steps_in_flight + 1)

    def _reserve(self, name: str, *shape: int) -> None:
        self._layout[name] = (self._size, shape)
        self._size += math.prod(shape)

    def _field(self, name: str) -> Tensor:
        start, shape = self._layout[name]
        return self.store[start : start + math.prod(shape)].view(shape)

    def _capacity(self, config: EngineConfig) -> int:
        """Most values one step can stage; the scheduler admits at most max_model_len prompt tokens a step."""
        a_row = len(_SCALAR_FIELDS) + 2 + MAX_DEVICE_STOP_IDS
        pages = min(config.cache.num_pages, self.num_rows * self.max_pages)
        return config.scheduler.max_model_len + pages + self.num_rows * (a_row + 2)

    def stage_init(self, init: RowInit) -> None:
        """A request moves in: every field of its row is written but the page table, which comes as diffs."""
        params = init.params
        assert params.seed is not None and params.temperature is not None
        self._put("num_computed", init.row, [init.num_computed])
        self._put("num_tokens", init.row, [len(init.token_ids)])
        self._put("max_total", init.row, [init.max_total_tokens])
        self._put("status", init.row, [int(RowStatus.RUNNING)])
        self._put("temperature", init.row, _float_bits(params.temperature))
        self._put("top_k", init.row, [min(params.top_k or 0, 2**31 - 1)])
        self._put("top_p", init.row, _float_bits(1.0 if params.top_p is None else params.top_p))
        self._put("seeds", init.row, np.array([params.seed], dtype=np.uint64).view(np.int32))
        stop_ids = init.stop_token_ids[:MAX_DEVICE_STOP_IDS]
        self._put("stop_ids", init.row, [*stop_ids, *[-1] * (MAX_DEVICE_STOP_IDS - len(stop_ids))])
        self._put("token_ids", init.row, init.token_ids)

    def stage_pages(self, diff: PageDiff) -> None:
        self._put("page_table", diff.row, diff.page_ids, diff.first_idx)

    def stage_batch(self, rows: Int32s, query_start_loc: Int32s) -> None:
        """Make the batch these rows; whatever lies behind them becomes padding."""
        n = len(rows)
        wanted_rows = np.full_like(self._batch_rows_mirror, self.scratch_row)
        wanted_rows[:n] = rows
        wanted_starts = np.full_like(self._query_start_mirror, query_start_loc[-1])
        wanted_starts[: n + 1] = query_start_loc
        self._put_changes("batch_rows", self._batch_rows_mirror, wanted_rows)
        self._put_changes("query_start_loc", self._query_start_mirror, wanted_starts)

    def flush(self) -> int:
        return self._staged.flush(self.store)

    def _put(self, name: str, row: int, values: Sequence[int] | Int32s, offset: int = 0) -> None:
        start, shape = self._layout[name]
        width = shape[1] if len(shape) > 1 else 1
        self._staged.put(start + row * width + offset, np.asarray(values, dtype=np.int32))

    def _put_changes(self, name: str, mirror: Int32s, wanted: Int32s) -> None:
        changed = np.flatnonzero(mirror != wanted)
        if len(changed):
            # One run from the first to the last change: simpler than many, and the array is short.
            first, end = int(changed[0]), int(changed[-1]) + 1
            self._staged.put(self._layout[name][0] + first, wanted[first:end])
            mirror[first:end] = wanted[first:end]


def _float_bits(value: float) -> Int32s:
    return np.array([value], dtype=np.float32).view(np.int32)
