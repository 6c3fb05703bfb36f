"""What the host knows of a request: its collected tokens for certain, the steps in flight by optimistic arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.types import Request

NO_ROW = -1


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    arrival_idx: int  # its place in the order of arrival, kept through preemption
    token_ids: list[int]  # prompt and collected outputs
    row: int = NO_ROW
    generation: int = 0  # how often it was admitted
    # The optimistic mirror: tokens computed once every launched step is done. Never below the device's value.
    num_computed: int = 0
    num_draws_in_flight: int = 0  # launched steps, not yet collected, that draw tokens for it
    num_drafts_in_flight: int = 0  # drafts those steps may accept, a token each beside the one that is drawn
    last_step_id: int = -1  # the newest step that has it
    page_ids: list[int] = field(default_factory=list)
    num_staged_pages: int = 0  # how many of them the device knows
    page_hashes: list[bytes] = field(default_factory=list)  # of the full pages of token_ids, as far as asked for
    num_remembered_pages: int = 0  # full pages, from the start, that were offered to the prefix cache
    num_cached_tokens: int | None = None  # found in the prefix cache when it was first admitted
    finished: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the lower priority value, then who came first."""
        return self.request.priority, self.arrival_idx

    @property
    def num_tokens_bound(self) -> int:
        """Most tokens the request has once every launched step is done."""
        return len(self.token_ids) + self.num_draws_in_flight + self.num_drafts_in_flight

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def wants_step(self) -> bool:
        """Whether another step could do it any good: the launched ones may already reach its length limit."""
        # Every launched step that draws gives one token at least.
        return not self.finished and len(self.token_ids) + self.num_draws_in_flight < self.request.max_total_tokens
