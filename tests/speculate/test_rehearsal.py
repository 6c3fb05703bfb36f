"""Drafts that are only rehearsed: the host finds what the device would have found, and how it is used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.build import Engine, decide_draft_length
from slipstream.plan import Composition
from slipstream.runner.generate_head import GenerateHead
from slipstream.scheduler.acceptance import Judged
from slipstream.scheduler.draft_length import AdaptiveLength, Lengths
from slipstream.scheduler.step_costs import StepCosts
from slipstream.speculate.ngram_rehearsal import NgramRehearsal
from slipstream.speculate.speculator import DraftBatch
from tests.engine.drive import make_request
from tests.speculate.test_ngram_search import oracle
from tests.speculations import speculation

CHOICES = (0, 1, 2, 3, 5, 7)


def judge_one(rehearsal: NgramRehearsal) -> tuple[int, int, int]:
    ((_, before, right, judged),) = rehearsal.judge([0])
    return before, right, judged


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=2, max_size=80),
    prompt_len=st.integers(1, 20),
    k=st.integers(1, 7),
    allowed=st.integers(1, 7),
    min_match=st.integers(1, 3),
)
def test_each_draft_is_judged_by_the_tokens_behind_it(
    text: list[int], prompt_len: int, k: int, allowed: int, min_match: int
) -> None:
    """A token at a time: drafts follow each other, and each is what a search through everything finds."""
    allowed = min(allowed, k)
    rehearsal = NgramRehearsal(speculation("ngram", k, settings={"prompt_lookup_min": min_match}, adaptive=True), 1)
    known = text[:prompt_len]
    rehearsal.move_in(0, known, allowed)
    assert judge_one(rehearsal) == (0, 0, 0), "nothing has come"
    begin, right = len(known), 0
    for token_id in text[prompt_len:]:
        known.append(token_id)
        draft = oracle(text[:begin], allowed, min_match, 5, k)
        is_right = draft[right] == token_id
        assert judge_one(rehearsal) == (right, right + is_right, right + 1)
        right += is_right
        if not is_right or right == k:
            begin, right = len(known), 0


def test_it_says_of_a_text_what_steps_found_that_checked_drafts(make_engine: Callable[..., Engine]) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    engine = make_engine(speculative_config=config, steps_in_flight=1)
    prompt = [7, 8, 9, 7, 8] * 4
    two_words = {"logit_bias": {7: 100.0, 8: 100.0}, "temperature": 1.0}
    engine.core.add(make_request("r", prompt, max_tokens=200, ignore_eos=True, **two_words))
    steps = [update for _ in range(40) for update in engine.core.step()]
    text = [*prompt, *steps[0].token_ids]
    assert engine.config.speculative is not None
    rehearsal = NgramRehearsal(engine.config.speculative, 1)
    rehearsal.move_in(0, text, 3)
    judge_one(rehearsal)
    for step in steps[1:]:
        text += step.token_ids
        accepted = step.num_accepted
        assert judge_one(rehearsal) == (0, accepted, min(accepted + 1, 3))
    counts = [step.num_accepted for step in steps]
    assert {0, 1, 2, 3} == set(counts), "otherwise nothing is shown"


def test_who_has_no_drafts_gains_nothing_by_them_and_says_nothing_of_others() -> None:
    writer = Writer(2)
    writer.write(fresh(100))
    assert writer.policy.length == 0
    writer.policy.move_in(1, writer.known, 0)
    usual = writer.policy.acceptance.usual.copy()
    assert not writer.policy.acceptance.right[1].any()
    rehearsal = writer.policy.rehearsal
    assert rehearsal is not None
    rehearsal.judge([1])
    writer.known += [5, 6] * 5
    assert rehearsal.judge([1]) == [Judged(1, 0, 0, 0)]
    assert (writer.policy.acceptance.usual == usual).all()


def test_what_has_not_come_true_yet_is_forgotten_when_drafts_are_checked() -> None:
    rehearsal = NgramRehearsal(speculation("ngram", 3, adaptive=True), 1)
    known = [5, 6] * 5
    rehearsal.move_in(0, known, 3)
    judge_one(rehearsal)
    known.append(5)
    assert judge_one(rehearsal) == (0, 1, 1)
    rehearsal.forget()
    known += [9] * 3
    before, _, judged = judge_one(rehearsal)
    assert before == judged, "of a draft from before"
    known.append(9)
    assert judge_one(rehearsal) == (0, 1, 1)


@pytest.mark.parametrize("nums_reqs", [(1,), (4,), (5,), (20,), (33,), (8, 12), (5, 31)])
def test_of_a_large_batch_everybody_has_a_turn(nums_reqs: tuple[int, ...]) -> None:
    """Also where the batch has another size each time. Each is judged by a text of its own."""
    most = max(nums_reqs)
    rehearsal = NgramRehearsal(speculation("ngram", 3, adaptive=True), most)
    texts = [[100 * row, 100 * row + 1] * 5 for row in range(most)]
    for row, text in enumerate(texts):
        rehearsal.move_in(row, text, 3)
    num_right, num_wrong = np.zeros(most), np.zeros(most)
    for step in range(200):
        rows = np.random.default_rng(step).permutation(nums_reqs[step % len(nums_reqs)]).tolist()
        for row, text in enumerate(texts):
            text.append(100 * row + step % 2 if row % 3 else 10_000 + 100 * step + row)
        said = rehearsal.judge(rows)
        assert len(said) == min(len(rows), 4)
        for judged in said:
            num_right[judged.row] += judged.num_right - judged.num_before
            num_wrong[judged.row] += judged.num_judged - judged.num_right
    repeats = np.arange(most) % 3 > 0
    assert (num_right[repeats] >= 9).all() and not num_wrong[repeats].any()
    assert (num_wrong[~repeats] >= 5).all() and not num_right[~repeats].any()


def test_a_step_reads_one_long_text_and_not_four() -> None:
    rehearsal = NgramRehearsal(speculation("ngram", 3, adaptive=True), 4)
    texts = [[row] * 10_000 for row in range(4)]
    for row, text in enumerate(texts):
        rehearsal.move_in(row, text, 3)
    turns = []
    for _ in range(6):
        turns.append(sorted(judged.row for judged in rehearsal.judge(range(4))))
        for row, text in enumerate(texts):
            text.append(row)
    assert turns == [[0], [1], [2], [3], [0, 1, 2, 3], [0, 1, 2, 3]]


class Writer:
    """A request whose text is given, drafts from what a search through everything finds, two steps in flight."""

    def __init__(self, num_reqs: int = 1, each: float = 0.06) -> None:
        costs = StepCosts(in_graphs=True)
        for k in CHOICES:
            costs.record(num_reqs, k, 1.0 + each * k)
        config = speculation("ngram", 7, adaptive=True)
        self.policy = AdaptiveLength(CHOICES, 5, num_reqs, costs, True, NgramRehearsal(config, num_reqs))
        self.known: list[int] = [1]
        self._num_reqs, self._made = num_reqs, 0
        for row in range(num_reqs):
            self.policy.move_in(row, self.known, 7)
        self._compositions: dict[tuple[int, int], Composition] = {}
        self._flying: list[tuple[Composition, int, Sequence[int]]] = []

    def write(self, text: Iterable[int]) -> list[Lengths]:
        """The draft lengths of each step."""
        coming, lengths_by_step, n = [*self.known, *(t for _, _, new in self._flying for t in new)], [], self._num_reqs
        begin, text = len(coming), list(text)
        coming += text
        while begin < len(coming):
            check, make = self.policy.next_lengths()
            check = min(check, self._made)
            lengths_by_step.append(Lengths(check, make))
            draft = oracle(coming[:begin], check, 1, 5, 7) if check else []
            right = 0
            while right < check and begin + right + 1 < len(coming) and draft[right] == coming[begin + right]:
                right += 1
            new = coming[begin : begin + right + 1]
            begin += len(new)
            self._made = make
            composition = self._compositions.setdefault(
                (check, make),
                Composition(
                    *(tuple(map(str, range(n))), (1,) * n, tuple(range(n)), (1 + check,) * n, (True,) * n),
                    *((check,) * n, n * (1 + check), make),
                ),
            )
            self.policy.launched(composition)
            self.policy.update()
            self._flying.append((composition, right, new))
            if len(self._flying) == 2:
                composition, right, new = self._flying.pop(0)
                self.known += new
                self.policy.collected(composition, [right] * n, [0] * n)
        return lengths_by_step


def fresh(count: int, start: int = 1000) -> range:
    """Tokens that never occurred before."""
    return range(start, start + count)


@pytest.mark.parametrize("num_reqs", [1, 16])
def test_where_nothing_repeats_no_step_makes_a_draft(num_reqs: int) -> None:
    writer = Writer(num_reqs)
    writer.write(fresh(60))
    assert set(writer.write(fresh(2000, 5000))) == {Lengths(0, 0)}


@pytest.mark.parametrize("num_reqs", [1, 16, 64, 128])
def test_where_the_text_begins_to_repeat_drafts_begin(num_reqs: int) -> None:
    writer = Writer(num_reqs)
    writer.write(fresh(500))
    lengths_by_step = writer.write(fresh(200))
    assert {lengths.make for lengths in lengths_by_step} == {0, 7}, "as many as there may be, whatever is checked"
    assert sum(lengths.make == 0 for lengths in lengths_by_step) < 50
    assert writer.policy.length == 7
    lengths_by_step = writer.write(fresh(300, 9000))
    assert lengths_by_step.index(Lengths(0, 0)) < 40, "and end with it"


def test_words_that_happen_to_be_followed_by_the_same_are_not_enough() -> None:
    """One token in ten is as it was after the one before it, and the next one is not."""
    writer, rng = Writer(), random.Random(0)
    writer.write(fresh(300))
    text = []
    for i in range(200):
        text += fresh(8, 10_000 + 8 * i)
        a = rng.randrange(1000, 1290)
        text += [a, a + 1]
    assert set(writer.write(text)) == {Lengths(0, 0)}


def test_only_drafts_from_the_text_are_rehearsed(make_engine: Callable[..., Engine]) -> None:
    adaptive = {"num_speculative_tokens": 3, "adaptive": True}
    engine = make_engine(speculative_config={"method": "ngram", **adaptive})
    policy, _ = decide_draft_length(engine.config, engine.core.runner.caches.caps)
    assert isinstance(policy, AdaptiveLength) and isinstance(policy.rehearsal, NgramRehearsal)
    assert speculation("ngram", 3, verify="rejection").depends_on_text_alone
    assert not speculation("ngram", 3, verify="synthetic").depends_on_text_alone
    assert not speculation("draft_model", 3).depends_on_text_alone


def test_an_engine_tells_of_its_texts_as_they_grow_and_of_who_may_have_drafts(
    make_engine: Callable[..., Engine],
) -> None:
    adaptive = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": True}
    engine = make_engine(speculative_config=adaptive, steps_in_flight=2)
    core, policy = engine.core, engine.core.scheduler.drafts.length
    assert isinstance(policy, AdaptiveLength) and core.runner.graphs.plan.num_proposed(1) == 3
    for k in (0, 1, 2, 3):
        for num_reqs in (1, 2, 4):
            policy.costs.record(num_reqs, k, 1.0 + 0.06 * k)
    policy.costs.observe = lambda *_: None  # type: ignore[method-assign]
    policy.length, policy.acceptance.usual[:] = 0, 0.0
    again = {"temperature": 1.0, "logit_bias": {7: 100.0}, "ignore_eos": True}
    core.add(make_request("none", [7, 8, 9, 7, 8] * 4, max_tokens=150, speculate=False, **again))
    for _ in range(60):
        core.step()
    assert policy.length == 0
    core.finish("none")
    core.add(make_request("two", [7, 8, 9, 7, 8] * 4, max_tokens=150, max_k=2, **again))
    while core.has_work and not policy.length:
        core.step()
    assert core.has_work and policy.length
    (state,) = core.scheduler.running
    assert policy.rehearsal is not None and policy.rehearsal._texts[state.row]._num_drafts == 2


def test_while_drafts_are_checked_nothing_is_rehearsed() -> None:
    writer = Writer()
    writer.write(fresh(300))
    writer.write(fresh(100))
    assert writer.policy.length == 7
    asked: list[Any] = []
    rehearsal = writer.policy.rehearsal
    assert rehearsal is not None
    assert all(text.draft is None for text in rehearsal._texts), "they are forgotten when drafts begin"
    rehearsal.judge = asked.append  # type: ignore[assignment, method-assign]
    writer.write(fresh(50, 1100))
    assert not asked


def test_what_is_usual_is_learnt_from_rehearsals() -> None:
    writer = Writer()
    writer.write(fresh(400))
    assert writer.policy.length == 0 and writer.policy.acceptance.usual[0] < 0.05
    writer.write(fresh(40))
    assert writer.policy.acceptance.usual[0] > 0.05


def test_a_beginning_says_nothing_of_what_its_drafts_will_cost() -> None:
    costs = StepCosts(in_graphs=False)
    for k in CHOICES:
        costs.record(1, k, 1.0 + 0.1 * k)
    policy = AdaptiveLength(CHOICES, 5, 1, costs, True, NgramRehearsal(speculation("ngram", 7, adaptive=True), 1))
    for _ in range(20):
        policy.record_seconds(Composition(("a",), (1,), (0,), (8,), (True,), (7,), 8, 7), 1.7)
        policy.record_seconds(Composition(("a",), (1,), (0,), (1,), (True,), (0,), 1, 7), 1.0)
    assert costs.seconds(1, 7) == pytest.approx(1.7, rel=0.02)
    assert costs.seconds(1, 0) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(("rehearses", "interval"), [(True, 24), (False, 30)])
def test_a_trial_that_makes_no_more_than_others_is_two_changes_and_not_three(rehearses: bool, interval: int) -> None:
    """Of 0.1 ms each, in steps of a millisecond; a hundredth of the time is for trials."""
    costs = StepCosts(in_graphs=True)
    for k in CHOICES:
        costs.record(1, k, 1e-3)
    rehearsal = NgramRehearsal(speculation("ngram", 7, adaptive=True), 1) if rehearses else None
    policy = AdaptiveLength(CHOICES, 3, 1, costs, True, rehearsal)
    policy.move_in(0, [1], 7)
    policy._rows_of(Composition(("a",), (1,), (0,), (4,), (True,), (3,), 4, 3))
    policy._begin_trial(1)
    assert policy._trial is not None and policy.longest_interval == pytest.approx(interval, abs=1)


def test_an_engine_says_how_many_are_checked_and_prices_steps_that_make_all(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": True})
    core, made = engine.core, []
    policy, draft = core.scheduler.drafts.length, GenerateHead.draft
    assert isinstance(policy, AdaptiveLength)

    def watched(self: GenerateHead, batch: DraftBatch, *args: Any, **kwargs: Any) -> None:
        made.append(batch.num_drafts)
        draft(self, batch, *args, **kwargs)

    monkeypatch.setattr(GenerateHead, "draft", watched)
    timer = core.runner.idle_work.timer
    assert timer is not None
    timer.time_launches(1, 2)
    assert set(made) == {3}
    monkeypatch.setattr(policy, "_decide", lambda: None)
    policy.length, policy.interval = 2, 1000
    core.add(make_request("r", [7, 8, 9, 7, 8] * 4, max_tokens=20, ignore_eos=True))
    assert core.stats.draft_length == 0
    seen = set()
    for _ in range(6):
        core.step()
        seen.add((core.stats.draft_length, core.scheduler.drafts.num_proposed))
    assert seen == {(2, 3)}
