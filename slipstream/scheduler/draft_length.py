"""How many drafts to make and to check: a fixed number, or the one that promises most tokens a second.

A draft length that adapts weighs two tables. What a step costs is measured (``step_costs``). How far drafts are right
is learnt from every step: for each request and place the probability that the draft there stands if those before it do.
Where a draft that was hoped for is not there, it counts as wrong. One length serves the batch, for one graph does.

Nothing is learnt of places that nobody checks. So every now and then one step drafts further than the others, where
drafts are not made as far as they go anyway, and the next step checks that. Where nothing is drafted, one step makes a
draft, and the next one does not check it: the device says whether it was the token that came. The first trial of a
request comes soon, the next one soon after a trial that was right and later after one that was wrong: after 10 to 20
steps, or as many more as it takes that trials cost a hundredth of the time. Drafts that depend on the text alone need
no trials there: they are rehearsed on the host, which loses nothing by waiting until it is sure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.scheduler.acceptance import Acceptance, Rows
from slipstream.scheduler.step_costs import StepCosts
from slipstream.speculate.rehearsal import Rehearsal
from slipstream.types import Composition

_MARGIN = 1.02  # a change has to promise more than this
_MARGIN_REHEARSED = 1.1  # to begin with drafts that are rehearsed: any text repeats a few words by chance
# Steps to the next trial: after one that was right, after a request has come, and where they are wrong again and again.
_SOON, _FIRST = 8, 16
_NEARLY = 0.97  # of what the usual length promises
_TRIAL_EVERY, _TRIAL_EVERY_OF_MANY, _MORE_FOR_EACH = 10, 20, 4  # one of many requests says more
_TRIAL_BEYOND, _TRIAL_AT_LAST = 24, 64  # beyond drafts that are made anyway there is less to find out; at the latest
_TRIAL_SHARE = 0.01  # of the time, at most, unless that would be rarer than the above
_CHANGE_S = 100e-6  # that the device may stand still when the length changes: the host is slower then; measured, H200


class Lengths(NamedTuple):
    """Of one step: drafts it checks at most, and drafts it makes for the next one."""

    check: int
    make: int


class DraftLength(Protocol):
    """Who decides. Asked before a step, told of it once it is launched, and again when it is collected."""

    def wanted(self) -> Lengths: ...

    def launched(self, composition: Composition) -> None: ...

    def collected(self, composition: Composition, num_accepted: Sequence[int], foreseen: Sequence[int]) -> None:
        """To be remembered: the device waits for the next step. Steps come in the order of their launches."""
        ...

    def update(self) -> None:
        """Now there is time to think about it: the device is busy."""
        ...

    def record_seconds(self, composition: Composition, seconds: float) -> None:
        """Of a step that had the device for itself, from its plan to its tokens."""
        ...

    def move_in(self, row: int, token_ids: Sequence[int] = (), num_drafts: int = 0) -> None:
        """Another request has the row: its tokens, a list that grows as they are collected, and drafts it may have."""
        ...


class FixedLength:
    def __init__(self, num_drafts: int) -> None:
        self._lengths = Lengths(num_drafts, num_drafts)

    def wanted(self) -> Lengths:
        return self._lengths

    def launched(self, composition: Composition) -> None:
        pass

    def collected(self, composition: Composition, num_accepted: Sequence[int], foreseen: Sequence[int]) -> None:
        pass

    def update(self) -> None:
        pass

    def record_seconds(self, composition: Composition, seconds: float) -> None:
        pass

    def move_in(self, row: int, token_ids: Sequence[int] = (), num_drafts: int = 0) -> None:
        pass


class _Trial(NamedTuple):
    """One step drafts further, the next one checks that, or only goes on; then the results are waited for."""

    length: int
    drafted: Composition | None = None  # the first of the two, once it is launched


class _Tried(NamedTuple):
    """A step under way that says what came of a trial."""

    step: int  # which one it is, counted from the first
    usual: int  # the length that the trial left
    longer: int
    foreseen_by: Sequence[int]  # whose drafts are there and not checked, by their places in the plan


class _Outcome(NamedTuple):
    """What a step has said of drafts."""

    composition: Composition
    num_drafts: int
    num_right: Sequence[int]  # of every request of the plan
    tried: _Tried | None


class AdaptiveLength:
    def __init__(
        self,
        lengths: Sequence[int],
        initial: int,
        num_rows: int,
        costs: StepCosts,
        foresees: bool = True,  # a draft that is not checked would have stood if it is the token that comes
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._choices = list(lengths)
        self._foresees = foresees
        self._rehearsal = rehearsal
        self.length = initial  # of all steps but those of a trial
        self._costs = costs
        self.acceptance = Acceptance(num_rows, max(lengths))
        self._batch: tuple[Composition, Rows] | None = None
        self._collected: list[_Outcome] = []  # not yet looked at
        self._num_launched, self._num_collected, self._num_looked_at = 0, 0, 0  # steps
        self._trial: _Trial | None = None
        self._tried: list[_Tried] = []
        self._num_since_trial, self._interval, self._longest_interval = 0, _FIRST, _TRIAL_EVERY
        self._decided_at: tuple[int, int] = (0, 0)  # batch size and version of the costs

    def wanted(self) -> Lengths:
        trial = self._trial
        if trial is None:
            return Lengths(self.length, self._made(self.length))
        if trial.drafted is None:
            return Lengths(self.length, self._made(trial.length))
        return Lengths(0 if self._goes_without else trial.length, self._made(self.length))

    def _made(self, num_checked: int) -> int:
        return num_checked if self._rehearsal is None else self._rehearsal.num_made(num_checked)

    @property
    def _goes_without(self) -> bool:
        """Whether the draft of a trial is not checked."""
        return self._foresees and not self.length

    @property
    def _rehearses(self) -> bool:
        return self._rehearsal is not None and not self.length

    def move_in(self, row: int, token_ids: Sequence[int] = (), num_drafts: int = 0) -> None:
        self.update()  # what is not yet learnt of the row is another's
        self.acceptance.move_in(row, drafts=self._rehearsal is None or num_drafts > 0)
        if self._rehearsal is not None:
            self._rehearsal.move_in(row, token_ids, num_drafts)
        # The more of a batch is new, the sooner a trial is worth it.
        others = 0 if self._batch is None else len(self._batch[1]) - 1
        self._interval = min(self._interval, max(_FIRST, self._interval * others // (others + 1)))

    def launched(self, composition: Composition) -> None:
        rows = self._rows_of(composition)
        step, self._num_launched = self._num_launched, self._num_launched + 1
        if self._decided_at != (len(rows), self._costs.version):
            self._decide()
        if self._trial is not None:
            self._go_on_trying(self._trial, step, composition)
            return
        if self._rehearses:
            return
        self._num_since_trial += 1
        if self._num_since_trial >= (2 * self._interval if self.length else self._interval):
            self._begin_trial(len(rows))

    def _go_on_trying(self, trial: _Trial, step: int, composition: Composition) -> None:
        if trial.drafted is None:
            # A step in which the trial found no room does not count; the next one will do.
            if composition.num_next_drafts >= trial.length:
                self._trial = trial._replace(drafted=composition)
            return
        self._trial = None
        foreseen_by: list[int] = []
        if self._goes_without:
            drafted = trial.drafted
            drawn = {key[:2] for key in zip(drafted.rows, drafted.generations, drafted.samples, strict=True) if key[2]}
            keys = zip(composition.rows, composition.generations, strict=True)
            foreseen_by = [i for i, key in enumerate(keys) if key in drawn and composition.num_tokens[i] == 1]
        if foreseen_by or max(composition.num_drafts) > self.length:
            self._tried.append(_Tried(step, self.length, trial.length, foreseen_by))

    def collected(self, composition: Composition, num_accepted: Sequence[int], foreseen: Sequence[int]) -> None:
        step, self._num_collected = self._num_collected, self._num_collected + 1
        tried = self._tried.pop(0) if self._tried and self._tried[0].step == step else None
        if num_drafts := max(composition.num_drafts):
            self._collected.append(_Outcome(composition, num_drafts, num_accepted, tried))
        elif tried is not None:
            self._collected.append(_Outcome(composition, 1, foreseen, tried))

    def update(self) -> None:
        if self._num_looked_at == self._num_collected:
            return
        self._num_looked_at = self._num_collected
        has_learnt = bool(self._collected)
        for outcome in self._collected:
            self._take(outcome)
        self._collected.clear()
        if self._rehearsal is not None and not self.length and self._batch is not None:
            has_learnt |= self._rehearse(self._rehearsal, self._batch[0])
        if has_learnt:
            self._decide()

    def record_seconds(self, composition: Composition, seconds: float) -> None:
        num_reqs, make = composition.num_reqs, composition.num_next_drafts
        check = composition.num_drafts[0]
        if composition.num_caught_up:
            return  # a pass over many tokens
        if composition.num_tokens != (1 + check,) * num_reqs or composition.num_drafts != (check,) * num_reqs:
            return  # somebody's prompt
        if self._rehearsal is not None:
            make = check  # what is rehearsed costs the device next to nothing to make
        if check != make:
            # A step of a trial costs what checking costs and what making costs, about half of a usual step each.
            less = self._costs.seconds(num_reqs, min(check, make))
            seconds = 0.0 if less is None else 2 * seconds - less
        if seconds > 0.0:
            self._costs.observe(num_reqs, max(check, make), seconds)

    # --- learning ---------------------------------------------------------------------------------

    def _take(self, outcome: _Outcome) -> None:
        composition, num_drafts, num_right, tried = outcome
        said_of = tried.foreseen_by if tried is not None else ()
        if not said_of:  # whose drafts were checked; the others are prompts
            said_of = [i for i, count in enumerate(composition.num_drafts) if count]
        if len(said_of) == composition.num_reqs:
            rows, right = self._rows_of(composition), np.array(num_right)
        else:
            rows = np.array([composition.rows[i] for i in said_of])
            right = np.array([num_right[i] for i in said_of])
        self.acceptance.learn(rows, right, num_drafts)
        if tried is not None:
            self._space_trials(rows, right, tried.usual, tried.longer)

    def _space_trials(self, rows: Rows, accepted: npt.NDArray[np.int64], usual: int, longer: int) -> None:
        """Soon again where a trial was right and more drafts nearly pay, later otherwise."""
        tokens = self.acceptance.tokens(rows)
        now, then = (self._rate(len(rows), length, tokens) for length in (usual, longer))
        is_right = 2 * np.count_nonzero(accepted > usual) >= len(rows)
        if is_right and now is not None and then is not None and then > _NEARLY * now:
            self._interval = max(_SOON, self._interval // 2)
        else:
            self._interval = min(2 * self._interval, self._longest_interval)

    def _rehearse(self, rehearsal: Rehearsal, batch: Composition) -> bool:
        """Whether a draft was right: without one, nothing that was not worth it before is worth it now."""
        said = rehearsal.judge(batch.rows)
        self.acceptance.learn_rehearsed(said, batch.num_reqs)
        return any(judged.num_right > judged.num_before for judged in said)

    def _rows_of(self, composition: Composition) -> Rows:
        """Batches come again and again."""
        if self._batch is None or self._batch[0] is not composition:
            self._batch = (composition, np.array(composition.rows, dtype=np.int64))
        return self._batch[1]

    # --- deciding ---------------------------------------------------------------------------------

    def _decide(self) -> None:
        """The length that promises most. A change has to promise a little more than nothing, or it would never end."""
        assert self._batch is not None
        rows = self._batch[1]
        self._decided_at = (len(rows), self._costs.version)
        tokens = self.acceptance.tokens(rows)
        now = self._rate(len(rows), self.length, tokens)
        margin = _MARGIN_REHEARSED if self._rehearses else _MARGIN
        best, best_rate = self.length, 0.0 if now is None else now * margin
        for length in self._choices:
            rate = self._rate(len(rows), length, tokens)
            if rate is not None and rate > best_rate and length != self.length:
                best, best_rate = length, rate
        if best != self.length:
            if self._rehearsal is not None:
                self._rehearsal.forget()
            # Of what lies beyond nothing is known that is not old; and who has given up soon looks again.
            if not self.length or not best:
                self._interval = min(self._interval, _FIRST if self.length else _SOON)
            self.length = best
            self._trial, self._num_since_trial = None, 0

    def _rate(self, num_reqs: int, length: int, tokens: Sequence[float]) -> float | None:
        seconds = self._costs.seconds(num_reqs, length)
        return None if seconds is None else tokens[length] / seconds

    def _begin_trial(self, num_reqs: int) -> None:
        """Try the next longer one, if it could pay at all and has not been tried just now."""
        longer = next((k for k in self._choices if k > self.length), None)
        seconds = self._costs.seconds(num_reqs, self.length)
        longer_seconds = None if longer is None else self._costs.seconds(num_reqs, longer)
        if longer is None or seconds is None or longer_seconds is None:
            self._num_since_trial = 0
            return
        # Of what drafts cost, making them is about a half. One step makes more, the next one may check them, then all
        # is as before: each is a change of the length, unless as many are made as ever.
        more, num_changes = longer_seconds - seconds, 3
        if self._goes_without:
            more, num_changes = more / 2, 2
        elif self._made(longer) == self._made(self.length):
            num_changes = 2
        extra = max(0.0, more + num_changes * _CHANGE_S) / seconds
        least = min(_TRIAL_EVERY + _MORE_FOR_EACH * (num_reqs - 1), _TRIAL_EVERY_OF_MANY)
        least = _TRIAL_BEYOND if self.length else least
        self._longest_interval = max(least, min(math.ceil(extra / _TRIAL_SHARE), _TRIAL_AT_LAST))
        self._num_since_trial = 0
        assert self._batch is not None
        rows = self._batch[1]
        tokens = self.acceptance.tokens(rows)
        at_best = tokens[self.length] + (longer - self.length) * (tokens[self.length] - tokens[max(0, self.length - 1)])
        if self.length == 0:
            at_best = 1.0 + longer
        if at_best / longer_seconds > tokens[self.length] / seconds:
            self._trial = _Trial(longer)
            # One request alone may be lucky, and where nothing is drafted a mistake costs more than another trial.
            more = 1.0 / num_reqs if self._goes_without else 0.0
            self.acceptance.distrust(rows, slice(self.length, longer), more)
