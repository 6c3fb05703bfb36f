"""The host's state of a request: exact for collected tokens, optimistic arithmetic for steps in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.request import MAX_DEVICE_STOP_IDS, Request

NO_ROW = -1
NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    arrival_idx: int  # its rank by arrival, kept through preemption
    token_ids: list[int]  # prompt and collected outputs
    root_hash: bytes = b""  # that of its first page begins with this
    drafts: bool = False  # whether tokens are drafted for it
    # Whether the drafter has missed some of its tokens since it was admitted: its pages do not hold all keys.
    has_draft_gap: bool = False
    drafted_until: int = 0  # tokens that the drafter had processed when it last missed some
    num_ahead: int = 0  # cache slots after its tokens that a step may write, for drafts and drafting
    row: int = NO_ROW
    generation: int = 0  # counts admissions of all requests, since ids may be reused
    # The optimistic mirror: computed tokens after every launched step. Never below the device's value.
    num_computed: int = 0
    num_draws_in_flight: int = 0  # launched steps, not yet collected, that sample a token for it
    num_drafts_in_flight: int = 0  # drafts that those steps may accept in addition
    page_ids: list[int] = field(default_factory=list)
    encoder_page_ids: list[int] = field(default_factory=list)  # of its encoder's output
    # Whether those pages are filled by a step in flight, and not yet known to the cache.
    is_encoding: bool = False
    capacity: int = 0  # slots of its pages; infinite once they reach its length limit
    num_staged_pages: int = 0  # pages that were staged to the device
    page_hashes: list[bytes] = field(default_factory=list)  # of the full pages of token_ids, computed on demand
    num_remembered_pages: int = 0  # full pages, from the start, that were offered to the prefix cache
    # With more tokens than this there is a page to offer; the last token is known before it is computed.
    remember_beyond: int = NEVER
    num_cached_tokens: int | None = None  # found in the prefix cache at its first admission
    last_step_id: int = -1  # of a finished request: its newest step in flight
    finished: bool = False
    # A step brings it only tokens, unless it ends: it has had its first ones and asked for no statistics.
    gets_only_tokens: bool = False
    max_total: int = field(init=False)  # no step is launched for it once its tokens and draws in flight are as many

    def __post_init__(self) -> None:
        # The step that ends a prompt counts as a draw, of no token where the request ends with it.
        self.max_total = self.request.max_total_tokens + (not self.request.draws)

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: by priority value, then by arrival."""
        return self.request.priority, self.arrival_idx

    @property
    def num_tokens_bound(self) -> int:
        """Upper bound of its tokens after every launched step."""
        return len(self.token_ids) + self.num_draws_in_flight + self.num_drafts_in_flight

    @property
    def num_left(self) -> int:
        """Tokens that no launched step computes: more than 1 while its prompt is in work."""
        return self.num_tokens_bound - self.num_computed

    @property
    def num_slots(self) -> int:
        """Cache slots that its next step may write, drafts and drafting after them included."""
        return min(self.num_tokens_bound + self.num_ahead, self.max_total)

    @property
    def num_slots_left(self) -> int:
        """Slots of its pages after those; below 0 if its next step needs more pages."""
        return self.capacity - self.num_tokens_bound - self.num_ahead

    @property
    def can_use_step(self) -> bool:
        """Whether another step could be useful: the launched ones may already reach its length limit."""
        # Every launched step that samples adds at least one token.
        return not self.finished and len(self.token_ids) + self.num_draws_in_flight < self.max_total

    def hold_pages(self, page_ids: list[int], page_size: int) -> None:
        self.page_ids = page_ids
        num_slots = len(page_ids) * page_size
        self.capacity = NEVER if num_slots >= self.max_total else num_slots

    def note_first_tokens(self) -> None:
        """Its first tokens, and the statistics reported with them, were delivered."""
        request = self.request
        self.gets_only_tokens = request.params.logprobs is None and len(request.stop_token_ids) <= MAX_DEVICE_STOP_IDS
