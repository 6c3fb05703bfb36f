"""Run the command line inside the test process."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple

import pytest

from slipstream.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


RunCli = Callable[..., Outcome]


def make_runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCli:
    """A function that takes the arguments and, for ``stdin``, a text; returns exit code and both outputs."""

    def run(*arguments: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def assert_one_line_error(outcome: Outcome, *messages: str) -> None:
    """Exit code 2, nothing on standard output, one line on standard error with all the messages."""
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    for message in messages:
        assert message in outcome.err
