"""The device's part of a step, as launches in order: inputs, target, sampling, commit. The same in a graph or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.attention.backend import AttentionBackend, AttentionContext
from slipstream.kernels.commit import commit
from slipstream.runner.input_batch import InputBatch, InputBuffers
from slipstream.runner.request_state import RequestRows
from slipstream.sampling.sampler import Sampled, SamplingNeeds, sample


class Model(Protocol):
    """What the runner asks of a model."""

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states after the final norm: [num_tokens, hidden]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        ...


class TargetOutput(NamedTuple):
    hidden: Tensor  # [padded_tokens, hidden]
    logits: Tensor  # [padded_reqs, vocab], of each request's last token


@dataclass(frozen=True, slots=True)
class StepProgram:
    model: Model
    backend: AttentionBackend
    rows: RequestRows
    buffers: InputBuffers
    kv_caches: list[Tensor]
    out: Tensor  # [max_reqs, 2] int32: new token or -1, status

    def context(self, batch: InputBatch) -> AttentionContext:
        """The step's attention. Building its metadata may launch work, and must not wait for any."""
        return AttentionContext(
            backend=self.backend,
            metadata=self.backend.build(batch.attention),
            kv_caches=self.kv_caches,
            positions=batch.positions,
            slot_mapping=batch.attention.slot_mapping,
        )

    def target(self, batch: InputBatch) -> TargetOutput:
        self.buffers.prepare(batch)
        return self.with_logits(batch, self.model.forward(batch.input_ids, self.context(batch)))

    def with_logits(self, batch: InputBatch, hidden: Tensor) -> TargetOutput:
        return TargetOutput(hidden, self.model.compute_logits(hidden.index_select(0, batch.last_token_indices)))

    def finish(self, batch: InputBatch, logits: Tensor, needs: SamplingNeeds) -> Sampled:
        """Draw a token for every request, and let the rows take it."""
        rows = self.rows
        sampled = sample(logits, rows.sampling, batch.batch_rows, needs)
        commit(
            sampled.token_ids,
            sampled.failed,
            batch.batch_rows,
            batch.attention.query_start_loc,
            rows.stop_ids,
            rows.max_total,
            rows.token_ids,
            rows.num_computed,
            rows.num_tokens,
            rows.status,
            self.out[: batch.batch_rows.shape[0]],
        )
        return sampled
