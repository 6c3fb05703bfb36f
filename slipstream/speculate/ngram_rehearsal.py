"""N-gram drafts rehearsed on the host: the same search as on the device, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.host_drafting import Judged
from slipstream.speculate.methods.ngram import MAX_KEY, MIN_KEY
from slipstream.speculate.ngram_match import copied, latest_longest_match
from slipstream.speculative_config import SpeculativeConfig

_AT_ONCE = 4  # texts processed after a step, about 10 us each while the device is busy
_MANY_UNREAD = 4096  # tokens, about 0.1 ms: enough for one step
_ROOM = 256  # initial capacity beyond the prompt


@dataclass(frozen=True, slots=True)
class _Search:
    min_match: int
    max_match: int
    num_drafts: int


class NgramRehearsal:
    def __init__(self, config: SpeculativeConfig, num_rows: int) -> None:
        self.num_proposed = config.num_proposed
        self._search = _Search(config.settings[MIN_KEY], config.settings[MAX_KEY], config.num_drafts)
        self._texts = [_Text((), 0)] * num_rows
        self._read_at = [0] * num_rows  # when a row was processed
        self._now = 0

    def move_in(self, row: int, token_ids: Sequence[int], num_drafts: int) -> None:
        self._texts[row] = _Text(token_ids, num_drafts)

    def forget(self) -> None:
        for text in self._texts:
            text.draft = None

    def judge(self, rows: Sequence[int]) -> list[Judged]:
        if len(rows) > 1:
            rows = sorted(rows, key=self._read_at.__getitem__)[:_AT_ONCE]  # the rows that have waited longest
        said: list[Judged] = []
        num_unread = 0
        self._now += 1
        for row in rows:
            text = self._texts[row]
            num_unread += text.num_unread
            if said and num_unread > _MANY_UNREAD:
                break  # it comes first the next time
            said.append(Judged(row, *text.judge(self._search)))
            self._read_at[row] = self._now
        return said


class _Text:
    """A request's tokens processed so far, and the draft that is compared with the following ones."""

    def __init__(self, source: Sequence[int], num_drafts: int) -> None:
        self._source = source  # grows when tokens are collected
        self._num_drafts = num_drafts
        self._tokens: npt.NDArray[np.int32] = np.empty(len(source) + _ROOM, dtype=np.int32)
        self._num_tokens = 0
        self.draft: list[int] | None = None
        self._begin, self._num_right = 0, 0  # position of the draft, and how many of its tokens were right

    @property
    def num_unread(self) -> int:
        return len(self._source) - self._num_tokens if self._num_drafts else 0

    def judge(self, search: _Search) -> tuple[int, int, int]:
        """Right drafts at the last call, right drafts now, and drafts judged so far."""
        if not self._num_drafts:
            return 0, 0, 0
        self._read()
        before = right = self._num_right
        is_wrong = False
        if self.draft is not None:
            for token_id in self._tokens[self._begin + right : self._num_tokens][: search.num_drafts - right].tolist():
                # A missing draft counts as rejected.
                is_wrong = right == len(self.draft) or self.draft[right] != token_id
                if is_wrong:
                    break
                right += 1
        self._num_right = right
        if self.draft is None or is_wrong or right == search.num_drafts:
            self.draft = self._find_draft(search)
            self._begin, self._num_right = self._num_tokens, 0
        return before, right, right + is_wrong

    def _find_draft(self, search: _Search) -> list[int]:
        """The drafts that would be proposed after the last token."""
        tokens = self._tokens[: self._num_tokens]
        end = latest_longest_match(tokens, search.min_match, search.max_match)
        return [] if end is None else copied(tokens, end, self._num_drafts)

    def _read(self) -> None:
        new = self._source[self._num_tokens :]
        end = self._num_tokens + len(new)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(end, dtype=np.int32)])
        self._tokens[self._num_tokens : end] = new
        self._num_tokens = end
