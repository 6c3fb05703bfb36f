"""Acceptance of drafts: by row and draft position, the probability of acceptance if all earlier ones are accepted.

It is updated after every step, while the device runs the next one. With a small model that is a third of a millisecond
for all of the host's work, so a few requests are counted one by one: arrays of a few numbers cost several times as
much.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.host_drafting import Judged

Rows = npt.NDArray[np.int64]

_RATE = 1 / 32  # of exponential forgetting
_MOST_SEEN = 1 / _RATE  # limit on the number of counted trials
_HOPE = 0.7  # initial estimate of acceptance
_PRIOR = 8.0  # weight of the prior, in steps
_STALE = 1.0  # weight of old estimates of positions without drafts
_STREAK, _AFRESH = 10, 6.0  # steps without an accepted draft after which the text has changed; weight of old estimates
_FEW = 4  # requests


class Acceptance:
    def __init__(self, num_rows: int, most: int) -> None:
        # Of every row and draft position: the probability of acceptance, and the number of its trials.
        self.right: npt.NDArray[np.float64] = np.full((num_rows, most), _HOPE)
        self._num_seen: npt.NDArray[np.float64] = np.zeros((num_rows, most))
        self.num_failed: Rows = np.zeros(num_rows, dtype=np.int64)  # steps since a draft was accepted
        self._num_all_failed = 0
        self.usual: npt.NDArray[np.float64] = np.full(most, _HOPE)  # mean over all requests, the prior of new ones
        self._positions = np.arange(most)

    def move_in(self, row: int, drafts: bool = True) -> None:
        """The row is assigned to another request."""
        self.right[row] = self.usual if drafts else 0.0
        self._num_seen[row] = _PRIOR
        self.num_failed[row] = 0

    def distrust(self, rows: Rows, positions: slice, more: float) -> None:
        """Reduce the weight of the estimates of these positions, so that new results count more."""
        at = np.s_[rows, positions]
        self._num_seen[at] = np.minimum(self._num_seen[at], _STALE + more)

    def tokens(self, rows: Rows) -> list[float]:
        """Mean tokens per step and request, by number of verified drafts."""
        accepted = np.cumprod(self.right[rows], axis=1)
        return [1.0, *(1.0 + np.cumsum(np.add.reduce(accepted) / len(rows))).tolist()]

    def learn(self, rows: Rows, accepted: npt.NDArray[np.int64], num_drafts: int) -> None:
        """Learn from a step that has verified drafts. Drafts after the first rejected one carry no information."""
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
        """Learn from drafts of some requests of a batch that were only rehearsed."""
        if not any(judged.num_judged > judged.num_before for judged in said):
            return
        # A request that is rehearsed in every fourth step forgets four times as much each time.
        known = max(len(said) / num_reqs * _MOST_SEEN, _STALE)
        for judged in said:
            self._count(judged, len(self.usual), known)
        self._count_usual(said, _RATE)

    def _count(self, judged: Judged, num_positions: int, known: float) -> None:
        """Earlier estimates count as ``known`` trials at most."""
        row, begin, num_right, end = judged
        right, num_seen = self.right[row], self._num_seen[row, :num_positions]
        if known < _MOST_SEEN:
            np.minimum(num_seen, known, out=num_seen)
        for position in range(begin, end):
            seen = float(num_seen[position]) + 1.0
            was = float(right[position])
            right[position] = was + max(1.0 / seen, _RATE) * ((position < num_right) - was)
            num_seen[position] = min(seen, _MOST_SEEN)

    def _count_usual(self, said: Sequence[Judged], share: float) -> None:
        num_tried, num_accepted = [0] * len(self.usual), [0] * len(self.usual)
        for _, begin, num_right, end in said:
            for position in range(begin, end):
                num_tried[position] += 1
                num_accepted[position] += position < num_right
        for position, count in enumerate(num_tried):
            if count:
                self.usual[position] += share * (num_accepted[position] / count - float(self.usual[position]))

    def _learn_many(self, rows: Rows, accepted: npt.NDArray[np.int64], num_drafts: int, share: float) -> None:
        """The same, vectorised."""
        positions = self._positions[:num_drafts]
        is_accepted, is_tried = positions < accepted[:, None], positions <= accepted[:, None]
        failed = self.num_failed[rows] = np.where(accepted > 0, 0, self.num_failed[rows] + 1)
        known = np.where(failed >= _STREAK, _AFRESH, _MOST_SEEN)[:, None]
        right = self.right[rows, :num_drafts]
        num_seen = np.minimum(self._num_seen[rows, :num_drafts], known) + is_tried
        rate = np.maximum(1.0 / np.maximum(num_seen, 1.0), _RATE)
        self.right[rows, :num_drafts] = right + is_tried * rate * (is_accepted - right)
        self._num_seen[rows, :num_drafts] = np.minimum(num_seen, _MOST_SEEN)
        num_tried, num_accepted = is_tried.sum(0), (is_accepted & is_tried).sum(0)
        usual = self.usual[:num_drafts]
        usual += share * (num_tried > 0) * (num_accepted / np.maximum(num_tried, 1) - usual)
