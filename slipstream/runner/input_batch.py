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
from slipstream.types import StepPlan

# Not a number in any float type, and far outside any index.
_POISON_INT32 = 0x7FF17FF1


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
        device = rows.store.device
        self._page_size = config.cache.page_size
        self._max_model_len = config.scheduler.max_model_len
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self.last_token_indices = torch.zeros(max_reqs, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(max_reqs, rows.max_pages, dtype=torch.int32, device=device)
        self.rows = rows

    def poison(self) -> None:
        """Make a read of anything this step did not write show at once."""
        for buffer in (self.input_ids, self.seq_lens, self.block_table):
            buffer.fill_(_POISON_INT32)
        for buffer in (self.positions, self.slot_mapping, self.last_token_indices):
            buffer.fill_(_POISON_INT32 << 32 | _POISON_INT32)

    def build(self, plan: StepPlan, padded_reqs: int, padded_tokens: int) -> InputBatch:
        """Stage the batch's composition and queue the preparation of its inputs."""
        rows = self.rows
        num_reqs = len(plan.requests)
        query_start_loc_cpu = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum([r.num_tokens for r in plan.requests], out=query_start_loc_cpu[1:])
        rows.stage_batch(np.array([r.row for r in plan.requests], dtype=np.int32), query_start_loc_cpu)
        rows.flush()

        batch_rows = rows.batch_rows[:padded_reqs]
        query_start_loc = rows.query_start_loc[: padded_reqs + 1]
        input_ids, positions = self.input_ids[:padded_tokens], self.positions[:padded_tokens]
        slot_mapping, seq_lens = self.slot_mapping[:padded_tokens], self.seq_lens[:padded_reqs]
        last_token_indices, block_table = self.last_token_indices[:padded_reqs], self.block_table[:padded_reqs]
        prepare_inputs(
            batch_rows,
            query_start_loc,
            rows.token_ids,
            rows.page_table,
            rows.num_computed,
            rows.num_tokens,
            rows.status,
            self._page_size,
            input_ids,
            positions,
            slot_mapping,
            seq_lens,
            last_token_indices,
            block_table,
        )
        bounds = np.array([r.num_computed_bound + r.num_tokens for r in plan.requests], dtype=np.int32)
        attention = CommonAttentionMetadata(
            num_reqs=num_reqs,
            num_actual_tokens=int(query_start_loc_cpu[-1]),
            max_query_len=max(r.num_tokens for r in plan.requests),
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc_cpu,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=np.minimum(bounds, self._max_model_len),
            block_table=block_table,
            slot_mapping=slot_mapping,
        )
        return InputBatch(input_ids, positions, last_token_indices, batch_rows, attention)
