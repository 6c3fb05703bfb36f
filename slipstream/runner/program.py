"""The device's part of a step, as launches in order: inputs, target, verification, commit, drafts.

The same in a graph or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.attention.context import AttentionContext, StepTokens
from slipstream.attention.groups import CacheGroups
from slipstream.kernels.commit import commit
from slipstream.runner.input_batch import InputBatch, InputBuffers
from slipstream.runner.request_state import RequestRows
from slipstream.sampling.sampler import SamplingNeeds
from slipstream.speculate.place_drafts import place_drafts
from slipstream.speculate.speculator import DraftBatch, Speculator
from slipstream.speculate.verify import Verifier


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
    logits: Tensor  # [padded_logits, vocab]


@dataclass(frozen=True, slots=True)
class StepProgram:
    model: Model
    caches: CacheGroups
    rows: RequestRows
    buffers: InputBuffers
    verifier: Verifier
    speculator: Speculator
    out: Tensor  # [max_reqs, NUM_HEADER_COLUMNS + k + 1] int32

    def context(self, batch: InputBatch, drafts: bool) -> AttentionContext:
        """The step's attention. Building its metadata may launch work, and must not wait for any.

        Where nobody drafts behind the step, nobody wants to know what the target thought.
        """
        tokens = StepTokens(batch.positions, batch.attention.slot_mapping, batch.attention)
        return self.caches.begin(tokens, self.speculator.taps(batch.input_ids.shape[0]) if drafts else None)

    def target(self, batch: InputBatch, drafts: bool) -> TargetOutput:
        self.buffers.prepare(batch)
        return self.with_logits(batch, self.model.forward(batch.input_ids, self.context(batch, drafts)))

    def with_logits(self, batch: InputBatch, hidden: Tensor) -> TargetOutput:
        wanted, is_decode = batch.logit_indices, batch.decode_len is not None
        # Where all decode, every token has its logits, in order.
        chosen = hidden if is_decode and len(wanted) == len(hidden) else hidden.index_select(0, wanted)
        return TargetOutput(hidden, self.model.compute_logits(chosen))

    def finish(self, batch: InputBatch, logits: Tensor, needs: SamplingNeeds) -> Tensor | None:
        """Check the drafts of every request, and let the rows take what comes of it. Gives log probabilities."""
        verified = self.verifier.verify(logits, self.rows.sampling, batch.drafted, needs)
        out = self.out[: batch.batch_rows.shape[0]]
        commit(verified.tokens, self.rows.state, batch.layout, batch.attention.query_lens, out)
        return verified.logprobs

    def draft(self, batch: DraftBatch, noise: bool, *, in_graph: bool) -> None:
        """Put the next drafts into the rows."""
        drafter = self.speculator
        draft_ids = drafter.propose(batch, noise) if in_graph else drafter.run(batch, noise)
        place_drafts(draft_ids, self.rows.batch_rows[: draft_ids.shape[0]], self.rows.state)
