"""What the host knows of a request: its collected tokens for certain, the steps in flight by optimistic arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.types import MAX_DEVICE_STOP_IDS, Request

NO_ROW = -1
NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    arrival_idx: int  # its place in the order of arrival, kept through preemption
    token_ids: list[int]  # prompt and collected outputs
    root_hash: bytes = b""  # that of its first page begins with this
    drafts: bool = False  # whether tokens are drafted for it
    # Whether the drafter has left out some of its tokens since it was admitted: its pages do not hold all keys.
    has_draft_gap: bool = False
    drafted_until: int = 0  # how many of its tokens the drafter has been shown, when it last was not
    num_ahead: int = 0  # slots of the cache after its tokens that a step may write: drafts, and drafting after them
    row: int = NO_ROW
    generation: int = 0  # the number of its latest admission, among those of all requests: ids may be used again
    # The optimistic mirror: tokens computed once every launched step is done. Never below the device's value.
    num_computed: int = 0
    num_draws_in_flight: int = 0  # launched steps, not yet collected, that draw tokens for it
    num_drafts_in_flight: int = 0  # drafts those steps may accept, a token each beside the one that is drawn
    page_ids: list[int] = field(default_factory=list)
    capacity: int = 0  # slots that its pages have; without end once they reach its length limit
    num_staged_pages: int = 0  # how many of the pages the device knows
    page_hashes: list[bytes] = field(default_factory=list)  # of the full pages of token_ids, as far as asked for
    num_remembered_pages: int = 0  # full pages, from the start, that were offered to the prefix cache
    # With more tokens than this there is a page to offer; the last token is known before it is computed.
    remember_beyond: int = NEVER
    num_cached_tokens: int | None = None  # found in the prefix cache when it was first admitted
    last_step_id: int = -1  # of a finished request: the newest step in flight that has it
    finished: bool = False
    # What a step brings it are tokens and nothing else, unless it ends: it has had its first and wants no figures.
    gets_only_tokens: bool = False
    max_total: int = field(init=False)  # no step is launched for it once its tokens and draws in flight are as many

    def __post_init__(self) -> None:
        # The step that ends a prompt counts as a draw, of no token where the request ends with it.
        self.max_total = self.request.max_total_tokens + (not self.request.draws)

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the lower priority value, then who came first."""
        return self.request.priority, self.arrival_idx

    @property
    def num_tokens_bound(self) -> int:
        """Most tokens the request has once every launched step is done."""
        return len(self.token_ids) + self.num_draws_in_flight + self.num_drafts_in_flight

    @property
    def num_slots(self) -> int:
        """Slots of the cache that its next step may write, drafts and drafting after them included."""
        return min(self.num_tokens_bound + self.num_ahead, self.max_total)

    @property
    def num_slots_left(self) -> int:
        """How many more it has pages for; below 0 if its next step wants some."""
        return self.capacity - self.num_tokens_bound - self.num_ahead

    @property
    def wants_step(self) -> bool:
        """Whether another step could do it any good: the launched ones may already reach its length limit."""
        # Every launched step that draws gives one token at least.
        return not self.finished and len(self.token_ids) + self.num_draws_in_flight < self.max_total

    def hold_pages(self, page_ids: list[int], page_size: int) -> None:
        self.page_ids = page_ids
        num_slots = len(page_ids) * page_size
        self.capacity = NEVER if num_slots >= self.max_total else num_slots

    def note_first_tokens(self) -> None:
        """It has had its first tokens, and what is reported with them."""
        request = self.request
        self.gets_only_tokens = request.params.logprobs is None and len(request.stop_token_ids) <= MAX_DEVICE_STOP_IDS
