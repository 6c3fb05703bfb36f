"""How a head keeps up with steps after which it proposes nothing: at once, or later, by notes of several steps.

A head that goes over every step reads its weights in every step. In recorded steps it may take notes instead: what it
would have been shown. It follows them when they are full, or before a step of another kind or another batch: pages may
change hands between batches, so notes are of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.kernels.triton_jit import next_power_of_2
from slipstream.speculate.draft_notes import DraftNotes
from slipstream.speculate.methods.heads import NUM_NOTED_STEPS
from slipstream.speculate.speculator import DraftBatch


class FollowingHead(Protocol):
    """The launches of a head that follows."""

    notes: DraftNotes | None  # None where following cannot wait

    def follow(self, batch: DraftBatch) -> None:
        """Go over the step's tokens."""
        ...

    def replay_first_pass(self, batch: DraftBatch) -> bool:
        """The same by its recorded first pass; False where there is none."""
        ...

    def note(self, batch: DraftBatch) -> None:
        """In place of ``follow``, of a step in which every request has one token."""
        ...

    def follow_notes(self, padded_reqs: int, num_steps: int) -> None:
        """Go over the noted steps of so many requests: so many or fewer, for notes that are not there have no slot."""
        ...


@dataclass(slots=True)
class _Noted:
    """Steps that there are notes of."""

    batch: object
    padded_reqs: int
    num_steps: int = 0


class HeadFollower:
    def __init__(self, head: FollowingHead) -> None:
        self._head = head
        self._noted: _Noted | None = None

    def leaves_notes(self, graph: BatchExecutionDescriptor) -> bool:
        """Whether a step that proposes nothing leaves notes when it is recorded whole."""
        return self._head.notes is not None and graph.query_len == 1

    def begin_step(self, batch: object, graph: BatchExecutionDescriptor | None) -> None:
        noted, notes = self._noted, graph is not None and self.leaves_notes(graph)
        if noted is not None and not (notes and noted.batch is batch and noted.num_steps < NUM_NOTED_STEPS):
            self.catch_up()
        if notes:
            if self._noted is None:
                assert self._head.notes is not None and graph is not None
                self._head.notes.clear()
                self._noted = _Noted(batch, graph.num_reqs)
            self._noted.num_steps += 1

    def record(self, batch: DraftBatch, graph: BatchExecutionDescriptor, *, warmup: bool) -> None:
        if not self.leaves_notes(graph):
            self._head.follow(batch)
            return
        self._head.note(batch)
        for power in range(NUM_NOTED_STEPS.bit_length() if warmup else 0):  # those kernels too are compiled
            self._head.follow_notes(graph.num_reqs, 1 << power)

    def run(self, batch: DraftBatch) -> None:
        if not self._head.replay_first_pass(batch):
            self._head.follow(batch)

    def catch_up(self) -> None:
        """Follow what there are notes of."""
        if self._noted is not None:
            self._head.follow_notes(self._noted.padded_reqs, next_power_of_2(self._noted.num_steps))
            self._noted = None

    def settle(self) -> None:
        self.catch_up()
        if self._head.notes is not None:
            self._head.notes.clear()  # a warm-up reads them: their slots may be others' by now
