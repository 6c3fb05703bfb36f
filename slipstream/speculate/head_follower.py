"""How a head processes steps after which it proposes nothing: at once, or later, by notes of several steps.

A head that processes every step reads its weights in every step. In captured steps it may take notes instead: the
inputs that it would have processed. It follows them when they are full, or before a step of another kind or another
batch: pages may be reassigned between batches, so notes belong to one batch.
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

    notes: DraftNotes | None  # None if following cannot be deferred

    def follow(self, batch: DraftBatch) -> None:
        """Process the step's tokens."""
        ...

    def replay_first_pass(self, batch: DraftBatch) -> bool:
        """The same by its captured first pass; False if there is none."""
        ...

    def note(self, batch: DraftBatch) -> None:
        """Replaces ``follow`` for a step in which every request has one token."""
        ...

    def follow_notes(self, padded_reqs: int, num_steps: int) -> None:
        """Process the noted steps, at most this many of each request: missing notes have no slot."""
        ...


@dataclass(slots=True)
class _Noted:
    """The steps that were noted."""

    batch: object
    padded_reqs: int
    num_steps: int = 0


class HeadFollower:
    def __init__(self, head: FollowingHead) -> None:
        self._head = head
        self._noted: _Noted | None = None

    def leaves_notes(self, graph: BatchExecutionDescriptor) -> bool:
        """Whether a step that proposes nothing takes notes when it is captured whole."""
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
        for power in range(NUM_NOTED_STEPS.bit_length() if warmup else 0):  # so that those kernels are compiled as well
            self._head.follow_notes(graph.num_reqs, 1 << power)

    def run(self, batch: DraftBatch) -> None:
        if not self._head.replay_first_pass(batch):
            self._head.follow(batch)

    def catch_up(self) -> None:
        """Process the noted steps."""
        if self._noted is not None:
            self._head.follow_notes(self._noted.padded_reqs, next_power_of_2(self._noted.num_steps))
            self._noted = None

    def settle(self) -> None:
        self.catch_up()
        if self._head.notes is not None:
            self._head.notes.clear()  # a warm-up reads them, and their slots may belong to other requests by now
