"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    num_waiting: int = 0
    num_running: int = 0
    num_free_pages: int = 0
    num_preemptions: int = 0
    num_drains: int = 0
    num_prompt_tokens: int = 0  # of all requests admitted so far, each once
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    draft_length: int = 0  # current draft length
