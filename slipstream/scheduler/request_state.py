"""What the host knows of a request: its collected tokens for certain, the steps in flight by optimistic arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.types import Request

NO_ROW = -1


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    token_ids: list[int]  # prompt and collected outputs
    row: int = NO_ROW
    generation: int = 0  # how often it was admitted
    # The optimistic mirror: tokens computed once every launched step is done. Never below the device's value.
    num_computed: int = 0
    num_draws_in_flight: int = 0  # launched steps, not yet collected, that draw a token for it
    last_step_id: int = -1  # the newest step that has it
    page_ids: list[int] = field(default_factory=list)
    num_staged_pages: int = 0  # how many of them the device knows
    finished: bool = False

    @property
    def num_tokens_bound(self) -> int:
        """Tokens the request has once every launched step is done, if none of them ends it."""
        return len(self.token_ids) + self.num_draws_in_flight

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def wants_step(self) -> bool:
        """Whether another step could do it any good: the launched ones may already reach its length limit."""
        return not self.finished and self.num_tokens_bound < self.request.max_total_tokens
