"""The per-step input buffers of a forward pass, at fixed addresses, filled on the device from the request rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig
from slipstream.kernels.prepare_inputs import prepare_inputs
from slipstream.runner.request_state import RequestRows
from slipstream.runner.staging import Int32s
from slipstream.types import StepPlan


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs: device tensors cut to the padded size, and what the host knows of them."""

    input_ids: Tensor  # [padded_tokens] int32
    positions: Tensor  # [padded_tokens] int64
    last_token_indices: Tensor  # [padded_reqs] int64
    batch_rows: Tensor  # [padded_reqs] int32
    attention: CommonAttentionMetadata


class InputBuffers:
    def __init__(self, config: EngineConfig, rows: RequestRows) -> None:
        max_tokens, max_reqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
        place = rows.store.device
        self._page_size = config.cache.page_size
        self._max_model_len = config.scheduler.max_model_len
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=place)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=place)
        self.slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=place)
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=place)
        self.last_token_indices = torch.zeros(max_reqs, dtype=torch.int64, device=place)
        self.block_table = torch.zeros(max_reqs, rows.max_pages, dtype=torch.int32, device=place)
        self.rows = rows

    def of_a_step(self) -> tuple[Tensor, ...]:
        """What every step fills anew, up to its padded size. Debug runs poison it before."""
        small = (self.seq_lens, self.last_token_indices, self.block_table)
        return (self.input_ids, self.positions, self.slot_mapping, *small)

    def stage(self, plan: StepPlan) -> InputBatch:
        """Send the batch's composition to the device. The batch that comes back has the plan's own size."""
        num_reqs = len(plan.requests)
        _, _, rows, counts, computed, _ = zip(*plan.requests, strict=True)  # as one column each
        num_tokens = np.array(counts, dtype=np.int32)
        query_start_loc_cpu = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(num_tokens, out=query_start_loc_cpu[1:])
        self.rows.stage_batch(np.array(rows, dtype=np.int32), query_start_loc_cpu)
        self.rows.flush()
        bounds = np.array(computed, dtype=np.int32) + num_tokens
        return self._batch(num_reqs, plan.num_tokens, query_start_loc_cpu, np.minimum(bounds, self._max_model_len))

    def stage_nothing(self) -> None:
        """Make the batch on the device one of padding alone, as it was before the first step."""
        self.rows.stage_batch(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32))
        self.rows.flush()

    def pad(self, batch: InputBatch, num_reqs: int, num_tokens: int) -> InputBatch:
        """The same step over more memory; what lies behind the batch is padding. The host's numbers stay the step's."""
        common = batch.attention
        bounds = common.seq_lens_cpu_upper_bound
        return self._batch(num_reqs, num_tokens, common.query_start_loc_cpu, bounds, common)

    def static(self, num_reqs: int, num_tokens: int, query_len: int | None) -> InputBatch:
        """A batch for a recording, which serves every step of its size: the host's numbers are the largest possible."""
        starts = np.minimum(np.arange(num_reqs + 1, dtype=np.int32), num_tokens)
        starts[-1] = num_tokens
        bounds = np.full(num_reqs, self._max_model_len, dtype=np.int32)
        # In a mixed batch one request may have all the tokens.
        return self._batch(num_reqs, num_tokens, starts, bounds, max_query_len=query_len or num_tokens)

    def prepare(self, batch: InputBatch) -> None:
        """Queue the filling of the batch from the rows."""
        rows, common = self.rows, batch.attention
        prepare_inputs(
            batch.batch_rows,
            common.query_start_loc,
            rows.token_ids,
            rows.page_table,
            rows.num_computed,
            rows.num_tokens,
            rows.status,
            self._page_size,
            batch.input_ids,
            batch.positions,
            common.slot_mapping,
            common.seq_lens,
            batch.last_token_indices,
            common.block_table,
        )

    def _batch(
        self,
        num_reqs: int,
        num_tokens: int,
        query_start_loc_cpu: Int32s,
        bounds: Int32s,
        real: CommonAttentionMetadata | None = None,  # the counts, where the batch is padded
        max_query_len: int | None = None,
    ) -> InputBatch:
        attention = CommonAttentionMetadata(
            num_reqs=num_reqs if real is None else real.num_reqs,
            num_actual_tokens=num_tokens if real is None else real.num_actual_tokens,
            max_query_len=max_query_len or int(np.diff(query_start_loc_cpu).max()),
            query_start_loc=self.rows.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=query_start_loc_cpu,
            seq_lens=self.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=bounds,
            block_table=self.block_table[:num_reqs],
            slot_mapping=self.slot_mapping[:num_tokens],
        )
        return InputBatch(
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.last_token_indices[:num_reqs],
            self.rows.batch_rows[:num_reqs],
            attention,
        )
