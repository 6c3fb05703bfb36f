"""The number of drafts to propose and to verify: fixed, or the one with the highest expected throughput.

An adaptive draft length combines two tables. The cost of steps is measured (``step_costs``). Acceptance is learnt from
every step: for each request and draft position the probability of acceptance if all earlier drafts are accepted. A
missing draft counts as rejected. One length serves the whole batch, since one graph does.

Positions that are never verified teach nothing. So every now and then a trial drafts further than usual, unless the
maximum is drafted anyway, and the next step verifies that. While nothing is drafted, a trial step proposes one draft,
and the next step does not verify it: the device reports whether it equals the next token. The first trial of a request
comes soon, the next one soon after a successful one and later after a failure: after 10 to 20 steps, or as many more as
limit the cost of trials to a hundredth of the time. Drafts that depend only on the text need no trials then: they are
rehearsed on the host, which loses nothing by waiting until it is sure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.host_drafting import Rehearsal
from slipstream.plan import Composition
from slipstream.scheduler.acceptance import Acceptance, Rows
from slipstream.scheduler.step_costs import StepCosts

_MARGIN = 1.02  # a change must be expected to gain more than this
_MARGIN_REHEARSED = 1.1  # to start drafting after rehearsal: any text repeats a few tokens by chance
# Steps to the next trial: after a success, after a request has arrived, and after repeated failures.
_SOON, _FIRST = 8, 16
_NEARLY = 0.97  # of the usual length's expected throughput
_TRIAL_EVERY, _TRIAL_EVERY_OF_MANY, _MORE_FOR_EACH = 10, 20, 4  # a trial with many requests is more informative
_TRIAL_BEYOND, _TRIAL_AT_LAST = 24, 64  # beyond drafts that are proposed anyway there is less to learn; at the latest
_TRIAL_SHARE = 0.01  # maximum share of the time, unless that would be rarer than the above
_CHANGE_S = 100e-6  # idle time of the device when the length changes, measured on an H200


class Lengths(NamedTuple):
    """Of one step: the maximum drafts it verifies, and the drafts it proposes for the next one."""

    check: int
    make: int


class DraftLength(Protocol):
    """The policy. Queried before a step, notified once it is launched, and again when it is collected."""

    def next_lengths(self) -> Lengths: ...

    def launched(self, composition: Composition) -> None: ...

    def collected(self, composition: Composition, num_accepted: Sequence[int], would_accept: Sequence[int]) -> None:
        """Only recorded, since the device waits for the next step. Steps come in the order of their launches."""
        ...

    def update(self) -> None:
        """Called while the device is busy: process what was recorded."""
        ...

    def record_seconds(self, composition: Composition, seconds: float) -> None:
        """The duration of a step that had the device for itself, from its plan to its tokens."""
        ...

    def move_in(self, row: int, token_ids: Sequence[int] = (), num_drafts: int = 0) -> None:
        """The row is assigned to another request, with a list of its tokens that grows, and its draft limit."""
        ...


def _same_number(num_checked: int) -> int:
    return num_checked


class FixedLength:
    def __init__(self, num_drafts: int) -> None:
        self._lengths = Lengths(num_drafts, num_drafts)

    def next_lengths(self) -> Lengths:
        return self._lengths

    def launched(self, composition: Composition) -> None:
        pass

    def collected(self, composition: Composition, num_accepted: Sequence[int], would_accept: Sequence[int]) -> None:
        pass

    def update(self) -> None:
        pass

    def record_seconds(self, composition: Composition, seconds: float) -> None:
        pass

    def move_in(self, row: int, token_ids: Sequence[int] = (), num_drafts: int = 0) -> None:
        pass


class _Trial(NamedTuple):
    """One step drafts further, the next one verifies that, or only continues; then the results are awaited."""

    length: int
    drafted: Composition | None = None  # the first of the two steps, once launched


class _Tried(NamedTuple):
    """A step in flight that shows the result of a trial."""

    step: int  # its number, counted from the first step
    usual: int  # the length before the trial
    longer: int
    unverified: Sequence[int]  # requests with drafts that are not verified, by index in the plan


class _Outcome(NamedTuple):
    """The result of a step for its drafts."""

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
        knows_acceptance: bool = True,  # an unverified draft would be accepted if it equals the next token
        rehearsal: Rehearsal | None = None,
        # Drafts that a step proposes if the next one verifies that many.
        num_proposed: Callable[[int], int] = _same_number,
    ) -> None:
        self.choices = list(lengths)
        self._num_proposed = num_proposed if rehearsal is None else rehearsal.num_proposed
        self._knows_acceptance = knows_acceptance
        self.rehearsal = rehearsal
        self.length = initial  # of all steps except trials
        self.costs = costs
        self.acceptance = Acceptance(num_rows, max(lengths))
        self._batch: tuple[Composition, Rows] | None = None
        self._collected: list[_Outcome] = []  # not yet processed
        self._num_launched, self._num_collected, self._num_looked_at = 0, 0, 0  # steps
        self._trial: _Trial | None = None
        self._tried: list[_Tried] = []
        self._num_since_trial, self.interval, self.longest_interval = 0, _FIRST, _TRIAL_EVERY
        self._decided_at: tuple[int, int] = (0, 0)  # batch size and version of the costs

    def next_lengths(self) -> Lengths:
        trial = self._trial
        if trial is None:
            return Lengths(self.length, self._num_proposed(self.length))
        if trial.drafted is None:
            return Lengths(self.length, self._num_proposed(trial.length))
        return Lengths(0 if self._goes_without else trial.length, self._num_proposed(self.length))

    @property
    def _goes_without(self) -> bool:
        """Whether the draft of a trial is not verified."""
        return self._knows_acceptance and not self.length

    @property
    def _rehearses(self) -> bool:
        return self.rehearsal is not None and not self.length

    def move_in(self, row: int, token_ids: Sequence[int] = (), num_drafts: int = 0) -> None:
        self.update()  # unprocessed results of the row are its previous request's
        self.acceptance.move_in(row, drafts=self.rehearsal is None or num_drafts > 0)
        if self.rehearsal is not None:
            self.rehearsal.move_in(row, token_ids, num_drafts)
        # The more of a batch is new, the sooner a trial is worth it.
        others = 0 if self._batch is None else len(self._batch[1]) - 1
        self.interval = min(self.interval, max(_FIRST, self.interval * others // (others + 1)))

    def launched(self, composition: Composition) -> None:
        rows = self._rows_of(composition)
        step, self._num_launched = self._num_launched, self._num_launched + 1
        if self._decided_at != (len(rows), self.costs.version):
            self._decide()
        if self._trial is not None:
            self._go_on_trying(self._trial, step, composition)
            return
        if self._rehearses:
            return
        self._num_since_trial += 1
        if self._num_since_trial >= (2 * self.interval if self.length else self.interval):
            self._begin_trial(len(rows))

    def _go_on_trying(self, trial: _Trial, step: int, composition: Composition) -> None:
        if trial.drafted is None:
            # A step that had no room for the trial does not count; the next one will do.
            if composition.num_next_drafts >= trial.length:
                self._trial = trial._replace(drafted=composition)
            return
        self._trial = None
        unverified: list[int] = []
        if self._goes_without:
            drafted = trial.drafted
            drawn = {key[:2] for key in zip(drafted.rows, drafted.generations, drafted.samples, strict=True) if key[2]}
            keys = zip(composition.rows, composition.generations, strict=True)
            unverified = [i for i, key in enumerate(keys) if key in drawn and composition.num_tokens[i] == 1]
        if unverified or max(composition.num_drafts) > self.length:
            self._tried.append(_Tried(step, self.length, trial.length, unverified))

    def collected(self, composition: Composition, num_accepted: Sequence[int], would_accept: Sequence[int]) -> None:
        step, self._num_collected = self._num_collected, self._num_collected + 1
        tried = self._tried.pop(0) if self._tried and self._tried[0].step == step else None
        if num_drafts := max(composition.num_drafts):
            self._collected.append(_Outcome(composition, num_drafts, num_accepted, tried))
        elif tried is not None:
            self._collected.append(_Outcome(composition, 1, would_accept, tried))

    def update(self) -> None:
        if self._num_looked_at == self._num_collected:
            return
        self._num_looked_at = self._num_collected
        has_learnt = bool(self._collected)
        for outcome in self._collected:
            self._take(outcome)
        self._collected.clear()
        if self.rehearsal is not None and not self.length and self._batch is not None:
            has_learnt |= self._rehearse(self.rehearsal, self._batch[0])
        if has_learnt:
            self._decide()

    def record_seconds(self, composition: Composition, seconds: float) -> None:
        num_reqs, make = composition.num_reqs, composition.num_next_drafts
        check = composition.num_drafts[0]
        if composition.num_caught_up:
            return  # a step with catch-up tokens
        if composition.num_tokens != (1 + check,) * num_reqs or composition.num_drafts != (check,) * num_reqs:
            return  # a step with prefill
        if self.rehearsal is not None or make == self._num_proposed(check):
            make = check  # rehearsed drafts cost the device next to nothing to propose
        if check != make and self._num_proposed(1) != 1:
            return  # any proposal costs as much as the largest: half of such a step is no step of another length
        if check != make:
            # A trial step costs half of verification and half of proposal, each about half of a usual step.
            less = self.costs.seconds(num_reqs, min(check, make))
            seconds = 0.0 if less is None else 2 * seconds - less
        if seconds > 0.0:
            self.costs.observe(num_reqs, max(check, make), seconds)

    # --- learning ---------------------------------------------------------------------------------

    def _take(self, outcome: _Outcome) -> None:
        composition, num_drafts, num_right, tried = outcome
        said_of = tried.unverified if tried is not None else ()
        if not said_of:  # requests with verified drafts; the others are prefills
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
        """Soon again after a successful trial and if more drafts nearly pay, later otherwise."""
        tokens = self.acceptance.tokens(rows)
        now, then = (self._rate(len(rows), length, tokens) for length in (usual, longer))
        is_right = 2 * np.count_nonzero(accepted > usual) >= len(rows)
        if is_right and now is not None and then is not None and then > _NEARLY * now:
            self.interval = max(_SOON, self.interval // 2)
        else:
            self.interval = min(2 * self.interval, self.longest_interval)

    def _rehearse(self, rehearsal: Rehearsal, batch: Composition) -> bool:
        """Whether a draft was right: without one, a length that was not worth it before is not worth it now."""
        said = rehearsal.judge(batch.rows)
        self.acceptance.learn_rehearsed(said, batch.num_reqs)
        return any(judged.num_right > judged.num_before for judged in said)

    def _rows_of(self, composition: Composition) -> Rows:
        """Cached, since batches repeat."""
        if self._batch is None or self._batch[0] is not composition:
            self._batch = (composition, np.array(composition.rows, dtype=np.int64))
        return self._batch[1]

    # --- deciding ---------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Choose the length with the highest expected throughput, with a margin so that it does not oscillate."""
        assert self._batch is not None
        rows = self._batch[1]
        self._decided_at = (len(rows), self.costs.version)
        tokens = self.acceptance.tokens(rows)
        now = self._rate(len(rows), self.length, tokens)
        margin = _MARGIN_REHEARSED if self._rehearses else _MARGIN
        best, best_rate = self.length, 0.0 if now is None else now * margin
        for length in self.choices:
            rate = self._rate(len(rows), length, tokens)
            if rate is not None and rate > best_rate and length != self.length:
                best, best_rate = length, rate
        if best != self.length:
            if self.rehearsal is not None:
                self.rehearsal.forget()
            # Everything beyond is known only from old results; after giving up, the next trial comes soon.
            if not self.length or not best:
                self.interval = min(self.interval, _FIRST if self.length else _SOON)
            self.length = best
            self._trial, self._num_since_trial = None, 0

    def _rate(self, num_reqs: int, length: int, tokens: Sequence[float]) -> float | None:
        seconds = self.costs.seconds(num_reqs, length)
        return None if seconds is None else tokens[length] / seconds

    def _begin_trial(self, num_reqs: int) -> None:
        """Try the next longer length, if it could pay at all and was not tried just now."""
        longer = next((k for k in self.choices if k > self.length), None)
        seconds = self.costs.seconds(num_reqs, self.length)
        longer_seconds = None if longer is None else self.costs.seconds(num_reqs, longer)
        if longer is None or seconds is None or longer_seconds is None:
            self._num_since_trial = 0
            return
        # Proposing is about half of the cost of drafts. One step proposes more, the next one may verify them, and the
        # next is as before: each is a change of the length, unless the same number is proposed throughout.
        more, num_changes = longer_seconds - seconds, 3
        if self._goes_without:
            more, num_changes = more / 2, 2
        elif self._num_proposed(longer) == self._num_proposed(self.length):
            num_changes = 2
        extra = max(0.0, more + num_changes * _CHANGE_S) / seconds
        least = min(_TRIAL_EVERY + _MORE_FOR_EACH * (num_reqs - 1), _TRIAL_EVERY_OF_MANY)
        least = _TRIAL_BEYOND if self.length else least
        self.longest_interval = max(least, min(math.ceil(extra / _TRIAL_SHARE), _TRIAL_AT_LAST))
        self._num_since_trial = 0
        assert self._batch is not None
        rows = self._batch[1]
        tokens = self.acceptance.tokens(rows)
        at_best = tokens[self.length] + (longer - self.length) * (tokens[self.length] - tokens[max(0, self.length - 1)])
        if self.length == 0:
            at_best = 1.0 + longer
        if at_best / longer_seconds > tokens[self.length] / seconds:
            self._trial = _Trial(longer)
            # One request may be lucky, and while nothing is drafted a wrong decision costs more than another trial.
            more = 1.0 / num_reqs if self._goes_without else 0.0
            self.acceptance.distrust(rows, slice(self.length, longer), more)
