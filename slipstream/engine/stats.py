"""What the engine counts. Plain numbers, so that they travel between processes."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field

from slipstream.types import TokenUpdates

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
    num_tokens_computed: int = 0  # prompt and output tokens that went through the model
    num_tokens_out: int = 0
    num_requests_finished: int = 0
    num_preemptions: int = 0
    num_drains: int = 0  # times the scheduler had to see older steps collected before it could go on
    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    num_prompt_tokens: int = 0  # of all requests admitted so far
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    prefix_cache_refused: int = 0  # 1 where the model cannot share what the user wanted shared
    num_graphs: int = 0  # that are recorded
    num_missing_graphs: int = 0  # that will be, when the engine is idle
    graph_bytes: int = 0  # of the device's memory, for all of them
    draft_length: int = 0  # how many tokens are drafted ahead just now
    num_sync_violations: int = 0  # waits for the device that the guard refused
    num_draft_steps: int = 0  # times drafts of a request were checked
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of those
    # The same two by place behind the last known token.
    num_draft_tokens_at: list[int] = field(default_factory=list)
    num_accepted_tokens_at: list[int] = field(default_factory=list)
    step_s: Histogram = field(default_factory=Histogram)  # from one collect to the next, while there was work
    host_s: Histogram = field(default_factory=Histogram)  # of that, everything but waiting for the device

    @property
    def prefix_hit_rate(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a check of drafts gives on average: the accepted ones and the target's own."""
        return 1.0 + self.num_accepted_tokens / max(1, self.num_draft_steps)

    def count_updates(self, updates: TokenUpdates) -> None:
        self.num_tokens_out += updates.num_tokens
        if updates.others:
            self.num_requests_finished += len(updates.ended)
        if any(updates.num_drafts):
            # Few of these pairs are different.
            for drafts, times in Counter(zip(updates.num_drafts, updates.num_accepted, strict=True)).items():
                if drafts[0]:
                    self.count_drafts(*drafts, times)

    def count_drafts(self, num_drafts: int, num_accepted: int, times: int = 1) -> None:
        """Drafts that a step has checked, of as many requests."""
        self.num_draft_steps += times
        self.num_draft_tokens += num_drafts * times
        self.num_accepted_tokens += num_accepted * times
        missing = num_drafts - len(self.num_draft_tokens_at)
        if missing > 0:
            self.num_draft_tokens_at += [0] * missing
            self.num_accepted_tokens_at += [0] * missing
        for i in range(num_drafts):
            self.num_draft_tokens_at[i] += times
        for i in range(num_accepted):
            self.num_accepted_tokens_at[i] += times
