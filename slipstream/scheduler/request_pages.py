"""The pages of requests: which each one holds, which it reserves ahead, and which it shares as prefixes.

A request takes a few pages more than its next step needs while the pool has enough, so that most steps change no page
table. Pages that a collected step has filled are offered to the prefix cache; a new request begins with cached pages
of its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.config import SchedulerConfig
from slipstream.scheduler.common_pages import count_common_pages
from slipstream.scheduler.draft_ledger import DraftLedger
from slipstream.scheduler.pages import PagePool, encoder_hashes, page_hashes
from slipstream.scheduler.request_state import NEVER, RequestState

_MOST_CHECKED_PAGES = 4096  # when idle
_TOP_UP_AT_ONCE = 32  # requests; limits the work of a single step


class CachedPages(NamedTuple):
    """What the prefix cache has of a request that is to be admitted. It is not held yet."""

    prefix: list[int]
    encoded: list[int]  # all of its encoder's output, or nothing

    @property
    def all(self) -> list[int]:
        return [*self.prefix, *self.encoded]


class RequestPages:
    def __init__(self, config: SchedulerConfig, pool: PagePool, drafts: DraftLedger) -> None:
        self._config, self._drafts = config, drafts
        self.pool = pool

    # --- reserve and release ----------------------------------------------------------------------

    def num_first(self, state: RequestState) -> int:
        """Pages of a newly admitted request: for all its tokens, the one that its first step samples, and for the
        output of its encoder.
        """
        return self._num_first_of_text(state) + self.pool.pages_for(state.request.num_encoder_entries)

    def _num_first_of_text(self, state: RequestState) -> int:
        return self.pool.pages_for(min(state.num_slots + 1, state.request.max_total_tokens))

    def reserve(self, state: RequestState) -> bool:
        """Reserve the pages of its next step, and some more; False if there are too few."""
        missing = self.pool.pages_for(state.num_slots) - len(state.page_ids)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        self._take(state, missing + self._num_spare(state, missing))
        return True

    def top_up(self, running: Sequence[RequestState]) -> None:
        """Spare pages for requests that need some soon: once a step changes one page table, more cost little."""
        soon = self.pool.page_size * (self._config.lookahead_pages // 2)
        for state in [s for s in running if 0 <= s.num_slots_left < soon][:_TOP_UP_AT_ONCE]:
            self._take(state, self._num_spare(state, 0))

    def _take(self, state: RequestState, count: int) -> None:
        state.hold_pages(state.page_ids + self.pool.take(count), self.pool.page_size)

    def _num_spare(self, state: RequestState, missing: int) -> int:
        to_limit = self.pool.pages_for(state.request.max_total_tokens) - len(state.page_ids) - missing
        to_spare = self.pool.num_free - missing - self.pool.num_usable // 4
        return max(0, min(self._config.lookahead_pages, to_limit, to_spare))

    def release(self, state: RequestState) -> None:
        self.pool.give_back(state.page_ids)
        self.pool.give_back(state.encoder_page_ids)
        state.hold_pages([], self.pool.page_size)
        state.encoder_page_ids, state.is_encoding = [], False
        state.num_staged_pages = 0

    def check_idle(self) -> None:
        """Without requests, every page must be free. A large pool is only counted: checking each page of an H200 takes
        20 ms, and the end of the last answer would wait for that."""
        if self.pool.num_pages <= _MOST_CHECKED_PAGES:
            self.pool.check([])
        if num_lost := self.pool.num_usable - self.pool.num_free:
            raise RuntimeError(f"leak: {num_lost} pages")

    # --- the prefix cache -------------------------------------------------------------------------

    def find_cached(self, state: RequestState) -> CachedPages:
        if not self._config.prefix_caching:
            return CachedPages([], [])
        return CachedPages(self._find_prefix(state), self._find_encoded(state))

    def _find_prefix(self, state: RequestState) -> list[int]:
        """The last token is always computed: its logits are needed."""
        if not state.request.may_use_cache:
            return []
        num_pages = (len(state.token_ids) - 1) // self.pool.page_size
        return self.pool.find(self._hashes(state, num_pages)[:num_pages])

    def _find_encoded(self, state: RequestState) -> list[int]:
        """An encoder reads its input as a whole: a part of the output does not spare a pass."""
        num_pages = self.pool.pages_for(state.request.num_encoder_entries)
        found = self.pool.find(encoder_hashes(state.root_hash, num_pages))
        return found if len(found) == num_pages else []

    def move_in(self, state: RequestState, cached: CachedPages) -> None:
        """It begins with the cached pages, whose tokens count as computed, and takes new ones."""
        self.pool.hold(cached.all)
        num_encoded = self.pool.pages_for(state.request.num_encoder_entries)
        state.is_encoding = bool(num_encoded) and not cached.encoded
        state.encoder_page_ids = cached.encoded or self.pool.take(num_encoded)
        num_new = self._num_first_of_text(state) - len(cached.prefix)
        state.hold_pages(cached.prefix + self.pool.take(num_new), self.pool.page_size)
        state.num_computed = len(cached.prefix) * self.pool.page_size
        self._expect_page(state, len(cached.prefix))

    def remember_encoded(self, state: RequestState) -> None:
        """Offer the output of its encoder to the cache, once the step is collected that has run it."""
        state.is_encoding = False
        if self._config.prefix_caching:
            hashes = encoder_hashes(state.root_hash, len(state.encoder_page_ids))
            for page_id, page_hash in zip(state.encoder_page_ids, hashes, strict=True):
                self.pool.remember(page_id, page_hash)

    def remember(self, state: RequestState, num_computed: int) -> None:
        """Offer the pages that a collected step has filled to the cache."""
        num_full = num_computed // self.pool.page_size
        if num_full > state.num_remembered_pages:
            hashes = self._hashes(state, num_full)
            is_drafted = self._drafts.has_all_keys(state)
            for idx in range(state.num_remembered_pages, num_full):
                self.pool.remember(state.page_ids[idx], hashes[idx], is_drafted)
            self._expect_page(state, num_full)

    def _expect_page(self, state: RequestState, num_remembered: int) -> None:
        state.num_remembered_pages = num_remembered
        state.remember_beyond = (num_remembered + 1) * self.pool.page_size if self._config.prefix_caching else NEVER

    def _hashes(self, state: RequestState, num_pages: int) -> list[bytes]:
        """Hashes of the first pages at least, from collected tokens only. Tokens never change, so neither do hashes."""
        known, page_size = state.page_hashes, self.pool.page_size
        if len(known) < num_pages:
            # The drafter's entry in a page's last slot may depend on the token after the page.
            num_after = self._drafts.num_next_tokens
            tokens = state.token_ids[len(known) * page_size : num_pages * page_size + num_after]
            known.extend(page_hashes(tokens, page_size, known[-1] if known else state.root_hash, num_after))
        return known

    def count_common(self, states: Sequence[RequestState], num_tokens: int) -> int:
        """Leading pages that all requests of a step share; 0 if reading them once does not pay."""
        return count_common_pages(states, num_tokens, self.pool.page_size, self._config.least_saved)
