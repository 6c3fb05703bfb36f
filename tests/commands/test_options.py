from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pytest
import typer

from slipstream import cli
from slipstream.commands.options import with_options
from slipstream.config import EngineOptions
from slipstream.sampling_params import PARAMETERS
from slipstream.speculate.options import fill_help


def flags_of(command: str) -> dict[str, Any]:
    params = typer.main.get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    return {flag: param for param in params for flag in param.opts}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_every_engine_option_is_there(command: str) -> None:
    known = flags_of(command)
    for option in fields(EngineOptions):
        assert flag(option.name) in known
        own = command == "bench" and option.name == "model"
        if not own and not (command != "bench" and option.name == "seed"):
            assert known[flag(option.name)].help == fill_help(option.metadata["help"])


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_sampling_parameter_is_there(command: str) -> None:
    known = flags_of(command)
    for name, parameter in PARAMETERS.items():
        # --seed included: at the command line it is the request's. --speculate is the engine's.
        if name != "timestamp_rules":  # which transcribing sets by itself
            assert (known[flag(name)].help == parameter.help) == (name != "speculate")
    assert flag("extra") not in known


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "serve"])
def test_speculation_is_said_alike_everywhere(command: str) -> None:
    known = flags_of(command)
    for name in ("--speculate", "--k", "--draft-model", "--speculative-config"):
        assert known[name].default is None
        assert known[name].help == {flag(f.name): fill_help(f.metadata["help"]) for f in fields(EngineOptions)}[name]
    assert known["--speculative-config"].metavar == "JSON"
    assert known["--speculate"].secondary_opts == []
    assert ("--max-k" in known) == (command in ("generate", "chat"))


@dataclass(frozen=True)
class Everything:
    """One field of every kind the generator knows."""

    number: int | None = field(default=None, metadata={"help": "A number."})
    ratio: float = 0.5
    name: str = "x"
    kind: Literal["a", "b"] = "a"
    words: tuple[str, ...] = ()
    off: bool = False
    on: bool = True
    table: dict[str, Any] | None = None
    bias: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Other:
    name: str = "other"
    own: int = 7


def call(*arguments: str, **defaults: Any) -> tuple[Everything, Other, str]:
    app = typer.Typer()
    got: list[tuple[Everything, Other, str]] = []

    @app.command()
    @with_options(**defaults)
    def command(first: Everything, second: Other, ratio: str = "mine") -> None:
        got.append((first, second, ratio))

    with pytest.raises(SystemExit) as done:
        app(list(arguments))
    assert done.value.code == 0
    return got[0]


def test_unset_options_keep_the_dataclass_defaults() -> None:
    assert call() == (Everything(), Other(), "mine")


def test_every_kind_of_field_is_parsed() -> None:
    scalars = ("--number", "3", "--name", "y", "--kind", "b", "--off", "--no-on", "--own", "9")
    others = ("--words", "p", "--words", "q", "--table", '{"k": [1]}', "--bias", '{"5": 0.5}')
    first, second, _ = call(*scalars, *others)
    assert first == Everything(
        number=3, name="y", kind="b", words=("p", "q"), off=True, on=False, table={"k": [1]}, bias={"5": 0.5}
    )
    assert second == Other(own=9)


def test_a_name_is_used_once_and_the_first_owner_gets_it() -> None:
    first, second, ratio = call("--name", "y", "--ratio", "0.1")
    assert (first.name, second.name) == ("y", "other")
    assert (first.ratio, ratio) == (0.5, "0.1")


def test_a_command_may_have_its_own_defaults() -> None:
    assert call(number=12)[0] == Everything(number=12)


def test_broken_json_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        call("--table", "{")
    assert "is not JSON" in capsys.readouterr().err
