"""The engine's counters. Plain numbers, so that they can be sent between processes."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from slipstream.output import DraftStats, TokenUpdates

# Upper edges in seconds: a step takes a fraction of a millisecond on a fast GPU, seconds for a long prompt on a CPU.
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_SECONDS) + 1))  # the last has no upper edge
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(STEP_SECONDS, seconds)] += 1
        self.total += seconds


@dataclass(slots=True)
class EngineStats:
    num_steps: int = 0
    num_tokens_computed: int = 0  # prompt and output tokens that the model has computed
    num_tokens_out: int = 0
    num_requests_finished: int = 0
    num_preemptions: int = 0
    num_drains: int = 0  # times the scheduler had to wait for older steps to be collected
    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    num_prompt_tokens: int = 0  # of all requests admitted so far
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    prefix_cache_refused: int = 0  # 1 if prefix caching is enabled but the model does not allow it
    num_graphs: int = 0  # captured so far
    num_missing_graphs: int = 0  # to be captured when the engine is idle
    graph_bytes: int = 0  # of the device's memory, for all of them
    draft_length: int = 0  # current draft length
    num_sync_violations: int = 0  # hidden synchronisations that the guard refused
    drafts: DraftStats = field(default_factory=DraftStats)  # of all requests together
    step_s: Histogram = field(default_factory=Histogram)  # from one collect to the next, while there was work
    host_s: Histogram = field(default_factory=Histogram)  # of that, everything but waiting for the device
    num_masked_steps: int = 0  # steps with constrained requests, whose second half waits for masks
    mask_wait_s: float = 0.0  # that the host waited for masks, while the device computed or not
    mask_pause_s: float = 0.0  # that the device waited between the halves of such steps

    @property
    def prefix_hit_rate(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def num_draft_steps(self) -> int:
        """Verifications, one per request and step."""
        return self.drafts.num_steps

    @property
    def num_draft_tokens(self) -> int:
        return self.drafts.num_drafts

    @property
    def num_accepted_tokens(self) -> int:
        return self.drafts.num_accepted

    @property
    def num_draft_tokens_at(self) -> list[int]:
        """By draft position."""
        return self.drafts.num_drafts_at

    @property
    def num_accepted_tokens_at(self) -> list[int]:
        return self.drafts.num_accepted_at

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens per verification: the accepted drafts and the target's own token."""
        return self.drafts.mean_length

    def count_updates(self, updates: TokenUpdates) -> None:
        self.num_tokens_out += updates.num_tokens
        if updates.others:
            self.num_requests_finished += len(updates.ended)
        if any(updates.num_drafts):
            pairs = zip(updates.num_drafts, updates.num_accepted, strict=True)
            self.drafts.add_all(pair for pair in pairs if pair[0])
