"""How far drafts are right: of each request and place, the probability that the draft there stands if those before do.

It is learnt from every step, while the device is busy with the next one. With a small model that is a third of a
millisecond for everything the host has to do, so few requests are counted one by one: arrays of a few numbers cost
several times as much.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.speculate.rehearsal import Judged

Rows = npt.NDArray[np.int64]

_RATE = 1 / 32  # of forgetting
_MOST_SEEN = 1 / _RATE  # more trials than this count as this many
_HOPE = 0.7  # of a draft of which nothing is known
_PRIOR = 8.0  # steps of its own that outweigh what a request is expected to be like
_STALE = 1.0  # the same for what is known of places that have not been drafted for
_STREAK, _AFRESH = 10, 6.0  # after so many steps without a right draft the text is another; the same for what was known
_FEW = 4  # requests


class Acceptance:
    def __init__(self, num_rows: int, most: int) -> None:
        # Of every row and place: the probability that a draft stands, and of how many trials that is known.
        self.right: npt.NDArray[np.float64] = np.full((num_rows, most), _HOPE)
        self._num_seen: npt.NDArray[np.float64] = np.zeros((num_rows, most))
        self.num_failed: Rows = np.zeros(num_rows, dtype=np.int64)  # steps since a draft was right
        self._num_all_failed = 0
        self.usual: npt.NDArray[np.float64] = np.full(most, _HOPE)  # of any request, for those that come
        self._places = np.arange(most)

    def move_in(self, row: int, drafts: bool = True) -> None:
        """Another request has the row."""
        self.right[row] = self.usual if drafts else 0.0
        self._num_seen[row] = _PRIOR
        self.num_failed[row] = 0

    def distrust(self, rows: Rows, places: slice, more: float) -> None:
        """What is known of those places is old: what is found out next counts more than it, or ``more`` against it."""
        at = np.s_[rows, places]
        self._num_seen[at] = np.minimum(self._num_seen[at], _STALE + more)

    def tokens(self, rows: Rows) -> list[float]:
        """That a step gives a request on average, by how many drafts it checks."""
        stand = np.cumprod(self.right[rows], axis=1)
        return [1.0, *(1.0 + np.cumsum(np.add.reduce(stand) / len(rows))).tolist()]

    def learn(self, rows: Rows, accepted: npt.NDArray[np.int64], num_drafts: int) -> None:
        """From a step that has checked drafts. A draft behind one that was wrong says nothing."""
        self._num_all_failed = 0 if accepted.any() else self._num_all_failed + 1
        share = 1 / (1 + _AFRESH) if self._num_all_failed >= _STREAK else _RATE
        if len(rows) > _FEW:
            self._learn_many(rows, accepted, num_drafts, share)
            return
        counts = zip(rows.tolist(), accepted.tolist(), strict=True)
        said = [Judged(row, 0, count, min(count + 1, num_drafts)) for row, count in counts]
        for judged in said:
            failed = 0 if judged.num_right else int(self.num_failed[judged.row]) + 1
            self.num_failed[judged.row] = failed
            self._count(judged, num_drafts, _AFRESH if failed >= _STREAK else _MOST_SEEN)
        self._count_usual(said, share)

    def learn_rehearsed(self, said: Sequence[Judged], num_reqs: int) -> None:
        """From drafts of some requests of a batch that were only tried out."""
        if not any(judged.num_judged > judged.num_before for judged in said):
            return
        # Who has a turn in every fourth step forgets four times as much at a turn.
        known = max(len(said) / num_reqs * _MOST_SEEN, _STALE)
        for judged in said:
            self._count(judged, len(self.usual), known)
        self._count_usual(said, _RATE)

    def _count(self, judged: Judged, num_places: int, known: float) -> None:
        """What was known before counts as ``known`` trials at most."""
        row, begin, num_right, end = judged
        right, num_seen = self.right[row], self._num_seen[row, :num_places]
        if known < _MOST_SEEN:
            np.minimum(num_seen, known, out=num_seen)
        for place in range(begin, end):
            seen = float(num_seen[place]) + 1.0
            was = float(right[place])
            right[place] = was + max(1.0 / seen, _RATE) * ((place < num_right) - was)
            num_seen[place] = min(seen, _MOST_SEEN)

    def _count_usual(self, said: Sequence[Judged], share: float) -> None:
        num_tried, num_stand = [0] * len(self.usual), [0] * len(self.usual)
        for _, begin, num_right, end in said:
            for place in range(begin, end):
                num_tried[place] += 1
                num_stand[place] += place < num_right
        for place, count in enumerate(num_tried):
            if count:
                self.usual[place] += share * (num_stand[place] / count - float(self.usual[place]))

    def _learn_many(self, rows: Rows, accepted: npt.NDArray[np.int64], num_drafts: int, share: float) -> None:
        """The same, all at once."""
        places = self._places[:num_drafts]
        stands, is_tried = places < accepted[:, None], places <= accepted[:, None]
        failed = self.num_failed[rows] = np.where(accepted > 0, 0, self.num_failed[rows] + 1)
        known = np.where(failed >= _STREAK, _AFRESH, _MOST_SEEN)[:, None]
        right = self.right[rows, :num_drafts]
        num_seen = np.minimum(self._num_seen[rows, :num_drafts], known) + is_tried
        rate = np.maximum(1.0 / np.maximum(num_seen, 1.0), _RATE)
        self.right[rows, :num_drafts] = right + is_tried * rate * (stands - right)
        self._num_seen[rows, :num_drafts] = np.minimum(num_seen, _MOST_SEEN)
        num_tried, num_stand = is_tried.sum(0), (stands & is_tried).sum(0)
        usual = self.usual[:num_drafts]
        usual += share * (num_tried > 0) * (num_stand / np.maximum(num_tried, 1) - usual)
