from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.commands.demo import PROMPTS, paint
from slipstream.output import Completion, DraftStats, RequestOutput, RequestTimings
from tests.commands.run_cli import RunCli, assert_one_line_error


def test_both_answers_and_both_speeds(cli: RunCli, tiny_model: Path) -> None:
    outcome = cli("demo", "--model", tiny_model, "--max-tokens", 12)
    assert outcome.code == 0, outcome.err
    for prompt in PROMPTS:
        assert f"> {prompt}" in outcome.out
    answers = re.findall(r"\[with(?:out)? drafts.*?\]\n(.*?)\n[\d.,]+ tokens per second", outcome.out, re.DOTALL)
    assert len(answers) == 2 * len(PROMPTS) and answers[::2] == answers[1::2]
    assert "Every answer is the same, token by token." in outcome.out
    assert len(re.findall(r"[\d.]+ x", outcome.out)) == len(PROMPTS) + 1, "each, and all together"


def test_a_prompt_of_the_user(cli: RunCli, tiny_model: Path) -> None:
    outcome = cli("demo", "[bold]Why?", "--model", tiny_model, "--max-tokens", 4)
    assert outcome.code == 0, outcome.err
    assert "> [bold]Why?\n" in outcome.out, "what looks like markup is text"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speculate", "none"), "leave out --speculate none"),
        ((" ",), "the prompt is empty"),
        (("--speculate", "ngrm"), "ngram"),
        (("--max-tokens", 1), "max-tokens"),
    ],
)
def test_what_cannot_be_compared(cli: RunCli, tiny_model: Path, arguments: tuple[object, ...], message: str) -> None:
    assert_one_line_error(cli("demo", *arguments, "--model", tiny_model), message)


def test_the_drafter_reads_the_prompt_itself(cli: RunCli, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt cached by the answer without drafts is one that it would have to guess without."""
    cached: list[int] = []

    def spy(outputs: Iterable[RequestOutput], *others: Any) -> RequestOutput:
        last = paint(outputs, *others)
        cached.append(last.num_cached_tokens)
        return last

    monkeypatch.setattr("slipstream.commands.demo.paint", spy)
    outcome = cli("demo", "Why? " * 30, "--model", tiny_model, "--max-tokens", 4)
    assert outcome.code == 0, outcome.err
    assert cached == [0, 0]


class Letters:
    """Token 0 is an ``a``."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in ids)


def steps(*taken: tuple[list[int], int]) -> Iterator[RequestOutput]:
    """An output a step: its tokens, and how many of them are accepted drafts."""
    token_ids: list[int] = []
    drafts = DraftStats()
    for fresh, accepted in taken:
        token_ids = token_ids + fresh
        if accepted:
            drafts.add(3, accepted)
        completion = Completion(token_ids=token_ids, speculation=drafts.copy())
        yield RequestOutput("a", None, [1], [completion], 0, RequestTimings())


def test_accepted_drafts_are_painted_and_the_targets_own_tokens_are_not() -> None:
    file = io.StringIO()
    out = Console(file=file, force_terminal=True, color_system="standard", soft_wrap=True, highlight=False)
    # A first token, two drafts and one token after them, a step whose drafts all failed, and one that ended at a draft.
    paint(steps(([0], 0), ([1, 2, 3], 2), ([4], 0), ([5, 6], 2)), Letters(), out)  # type: ignore[arg-type]
    green = "\x1b[1;32m{}\x1b[0m"
    assert file.getvalue() == "a" + green.format("bc") + "d" + "e" + green.format("fg") + "\n"


class Half:
    """Ends in the middle of a character, after what looks like markup and like an emoji's name."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "[/b] :key: \N{REPLACEMENT CHARACTER}" if ids else ""


def test_answers_are_shown_as_they_are() -> None:
    file = io.StringIO()
    paint(steps(([0], 0)), Half(), Console(file=file, soft_wrap=True))  # type: ignore[arg-type]
    assert file.getvalue() == "[/b] :key: \N{REPLACEMENT CHARACTER}\n"


def test_texts_that_may_differ_are_no_demo(cli: RunCli, tiny_model: Path) -> None:
    arguments = '{"method": "ngram", "verify": "rejection"}'
    assert_one_line_error(cli("demo", "--model", tiny_model, "--speculative-config", arguments), "verify 'rejection'")
