"""Command-line options from the fields of dataclasses.

A command declares a parameter of type ``EngineOptions`` or ``SamplingParams``; the user sees one option per field. A
new field of the dataclass appears on every command that takes it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from slipstream.config import EngineOptions
from slipstream.errors import ConfigError
from slipstream.load.settings import LoadSettings
from slipstream.sampling_params import SamplingParams
from slipstream.server.settings import ServerSettings
from slipstream.speculate.options import fill_help
from slipstream.train.settings import BlockSettings, TrainSettings

R = TypeVar("R")

_PANELS: dict[type, str] = {
    EngineOptions: "Engine",
    SamplingParams: "Sampling",
    ServerSettings: "Server",
    TrainSettings: "Training",
    BlockSettings: "Training",
    LoadSettings: "Load",
}

# Fields that a command for one request does not need. `--speculate` is the engine's: it names a method, and without it
# nothing is drafted. Operations from outside the package belong to programs that register them.
_WITHOUT_OPTION: dict[type, tuple[str, ...]] = {SamplingParams: ("speculate", "timestamp_rules", "extra")}


def with_options(**defaults: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Expand every dataclass parameter of a command into one option per field.

    ``defaults`` override the fields' defaults. A name is used once: the command's own parameters come first, then the
    dataclasses in the order of the signature; a field whose name is taken gets no option and keeps its default, and so
    does one that no command needs.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        declared = inspect.signature(command, eval_str=True).parameters.values()
        groups: dict[str, Any] = {p.name: p.annotation for p in declared if is_dataclass(p.annotation)}
        options = [p.replace(kind=p.KEYWORD_ONLY) for p in declared if p.name not in groups]
        taken = {p.name for p in options}
        names: dict[str, list[str]] = {}
        for group, kind in groups.items():
            hints = get_type_hints(kind)
            own = [f for f in fields(kind) if f.name not in (*taken, *_WITHOUT_OPTION.get(kind, ()))]
            options += [_option(f, hints[f.name], kind, defaults.get(f.name, f.default)) for f in own]
            names[group] = [f.name for f in own]
            taken.update(names[group])

        @functools.wraps(command)
        def run(**given: Any) -> R:
            for group, kind in groups.items():
                values = {name: given.pop(name) for name in names[group]}
                # An unset option keeps the dataclass's default; the dataclass checks the others.
                given[group] = kind(**{name: _frozen(value) for name, value in values.items() if value is not None})
            return command(**given)

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in options}
        return run

    return decorate


def refuse_options_before(context: typer.Context) -> None:
    """A command with sub-commands has its own options, which do not apply to a sub-command that follows."""
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if source is not None and source.name == "COMMANDLINE":
            flag, sub = param.opts[-1], context.invoked_subcommand
            path = context.command_path
            raise ConfigError(f"{flag} is an option of '{path}'; put those of '{path} {sub}' after '{sub}'")


def _option(field: Field[Any], annotation: Any, owner: type, default: Any) -> inspect.Parameter:
    flag = "--" + field.name.replace("_", "-")
    kind = _value_type(annotation)
    settings: dict[str, Any] = {
        "help": fill_help(field.metadata.get("help") or "") or None,
        "rich_help_panel": _PANELS.get(owner),
    }
    if default is MISSING or default == ():
        default = None
    if kind is bool and default is not False:  # a default that depends on something can be switched either way
        flag += "/--no-" + field.name.replace("_", "-")
    elif kind is dict:
        settings |= {"parser": _parse_json, "metavar": "JSON"}
    if kind is not bool:
        kind = kind | None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=typer.Option(default, flag, **settings)
    )


def _value_type(annotation: Any) -> Any:
    """The type of one value on the command line: a scalar, a list of scalars, or ``dict`` for anything in JSON."""
    members = [kind for kind in get_args(annotation) if kind is not NoneType]
    if get_origin(annotation) is Literal:
        return str
    if get_origin(annotation) is tuple:
        return list[members[0]]  # type: ignore[valid-type]
    if len(members) == 1 and get_origin(annotation) is not dict:  # X | None
        return _value_type(members[0])
    return annotation if annotation in (bool, int, float, str) else dict


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON ({error})") from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
