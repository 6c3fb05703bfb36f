"""The fuzz against plain decoding: a small run without differences, the same again, and faults that it finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lossless_fuzz import describe_difference, main, run_fuzz
from lossless_fuzz_compare import Comparison
from lossless_fuzz_engines import DRAFTERS, draw_engine
from lossless_fuzz_runs import Settings, Tally
from result_files import read_result
from slipstream.engine.output_processor import OutputProcessor
from slipstream.output import Logprob
from slipstream.sampling import penalties
from slipstream.scheduler.pages import PagePool
from slipstream.speculate import verify

BY_NAME = {drafter.name: drafter for drafter in DRAFTERS}


def test_no_request_differs_from_plain_decoding() -> None:
    outcome = run_fuzz(Settings(num_requests=27, seed=10, per_engine=3))
    assert [describe_difference(difference, "") for difference in outcome.differences] == []
    total = Tally()
    for tally in outcome.tallies.values():
        assert tally.num_requests == 3
        total += tally
    assert total.num_accepted > 100
    assert min(total.num_preemptions, total.num_cached_tokens, total.num_aborted) > 0
    assert total.num_logprobs > 1000
    assert total.ends.keys() == {"length", "stop", "stop string", "abort"}


def test_engines_of_a_drafter_differ_in_what_matters() -> None:
    for place, drafter in enumerate(DRAFTERS):
        choices = [draw_engine(0, place + turn * len(DRAFTERS), DRAFTERS) for turn in range(4)]
        assert {choice.drafter for choice in choices} == {drafter}
        assert {choice.options["steps_in_flight"] for choice in choices} == {1, 2, 4}
        if drafter.method:
            assert {choice.lengths for choice in choices} == {"fixed", "drawn", "adaptive"}
        if drafter.plain == "target":
            assert {choice.options["enable_prefix_caching"] for choice in choices} == {True, False}


def test_one_request_is_looked_at_again_in_the_same_run() -> None:
    """With all requests of its engine, and without the other engines."""
    drafters = (BY_NAME["EAGLE"], BY_NAME["ngram"])
    settings = Settings(num_requests=8, per_engine=4, drafters=drafters)
    whole = run_fuzz(settings)
    assert whole.last is not None
    again = run_fuzz(settings, only=whole.last.request.idx)
    assert again.last is not None
    assert (again.last.request, again.last.choice) == (whole.last.request, whole.last.choice)
    assert again.last.found is not None and whole.last.found is not None
    assert again.last.found.outputs == whole.last.found.outputs
    for figure in ("num_drafts", "num_accepted", "num_preemptions", "num_cached_tokens", "engines"):
        assert getattr(again.tallies[drafters[1]], figure) == getattr(whole.tallies[drafters[1]], figure)
    assert again.tallies[drafters[0]] == Tally()
    assert again.tallies[drafters[1]].num_requests == 1


# --- faults, planted --------------------------------------------------------------------------------


def accept_first_draft(accept: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(target_ids: Tensor, draft_ids: Tensor, *others: Any) -> Any:
        starts = others[2][:-1].long().clamp(max=len(draft_ids) - 1)
        wrong = target_ids.clone()
        wrong[starts] = torch.where(draft_ids[starts] >= 0, draft_ids[starts].to(wrong.dtype), wrong[starts])
        return accept(wrong, draft_ids, *others)

    return faulty


def forget_drafts(penalise: Callable[..., Any]) -> Callable[..., Any]:
    """Penalties by what came before the step."""

    def faulty(logits: Tensor, rows: Tensor, token_ids: Tensor, positions: Tensor, *others: Any) -> Any:
        first = [min(int(p) for r, p in zip(rows, positions, strict=True) if r == row) for row in rows]
        return penalise(logits, rows, token_ids, torch.tensor(first, dtype=positions.dtype), *others)

    return faulty


def hold_once(_hold: Callable[..., Any]) -> Callable[..., Any]:
    """A page that two requests share comes back when the first of them ends."""

    def faulty(self: PagePool, page_ids: list[int]) -> None:
        for page_id in page_ids:
            self._num_holders[page_id] = 1
            self._unheld.pop(page_id, None)

    return faulty


def keep_what_follows(_show: Callable[..., Any]) -> Callable[..., Any]:
    """Tokens that came in the same step as the last token of a stop string."""

    def faulty(self: OutputProcessor, stream: Any, update: Any) -> None:
        token_ids = [*stream.token_ids]
        _show(self, stream, update)
        stream.token_ids[:] = token_ids

    return faulty


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str, int]] = {
    "a wrong draft is accepted": (verify, "accept_drafts", accept_first_draft, "draft model", 0),
    "penalties ignore the drafts before": (penalties, "apply_penalties", forget_drafts, "ngram", 4),
    "a shared page is used again too early": (PagePool, "hold", hold_once, "ngram", 1),
    "tokens after a stop string stay": (OutputProcessor, "_show_text", keep_what_follows, "draft model", 5),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, plant, drafter, seed = FAULTS[name]
    monkeypatch.setattr(owner, attribute, plant(getattr(owner, attribute)))
    outcome = run_fuzz(Settings(16, seed, 16, (BY_NAME[drafter],)))
    assert len(outcome.differences) == outcome.tallies[BY_NAME[drafter]].num_different > 0
    difference = outcome.differences[0]
    *lines, last = describe_difference(difference, "python fuzz.py --seed 0")
    assert last == f"  again: python fuzz.py --seed 0 --only {difference.request.idx}"
    shown = json.loads(next(line for line in lines if line.startswith("  request: ")).removeprefix("  request: "))
    assert shown["given"].keys() == difference.request.given.keys()


# --- comparing and reporting ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "plain", "num_rounded", "num_differences"),
    [
        (-1.25, -1.25, 0, 0),
        (-1.25, -1.25 - 5e-10, 0, 0),
        (-1.25, -1.25 - 2.0**-23, 1, 0),  # the next float32
        (-1.25, -1.25 - 2.0**-22, 0, 1),  # the one after that
        (-1e-3, -1e-3 - 2e-9, 0, 1),
        (float("-inf"), float("-inf"), 0, 0),
        (-1.25, float("-inf"), 0, 1),
        (float("nan"), float("nan"), 0, 1),
    ],
)
def test_log_probabilities_are_compared(found: float, plain: float, num_rounded: int, num_differences: int) -> None:
    comparison = Comparison()
    own, other = ([{7: Logprob(value, 1, "x")}] for value in (found, plain))
    comparison.check_logprobs("logprobs", own, other, is_cut=False)
    assert (comparison.num_rounded, len(comparison.differences)) == (num_rounded, num_differences)


def test_the_command_writes_a_result_and_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "2", "--per-engine", "1", "--output-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "this run says too little: hybrid, MTP: of 0 draft tokens none was accepted" in shown
    assert "0 differences; written to" in shown
    result = read_result(next(tmp_path.glob("*.json")))
    assert result.kind == "lossless-fuzz"
    rows = {row["drafter"]: row for row in result.rows}
    assert rows.keys() == BY_NAME.keys()
    assert (rows["EAGLE-3"]["case"], rows["hybrid, none"]["case"]) == ("tiny-llama+eagle3", "tiny-qwen3-next")
    assert rows["none"]["num_requests"] == rows["ngram"]["num_requests"] == 1
