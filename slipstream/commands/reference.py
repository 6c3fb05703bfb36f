"""The reference tables of the documentation, generated from the dataclasses that define options and parameters.

``python -m slipstream.commands.reference`` writes them into the pages of a checkout; a test fails when a page is out of
date. Knows Markdown and nothing of what the options do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from slipstream.config import EngineOptions
from slipstream.errors import ConfigError
from slipstream.load.settings import LoadSettings
from slipstream.sampling_params import PARAMETERS, SamplingParams
from slipstream.server.settings import ServerSettings
from slipstream.speculate.options import fill_help
from slipstream.train.settings import TrainSettings

# Shown as the default of engine options that are derived from the model and the machine.
_UNSET = {"speculate": "none", "k": "the method's", "draft_model": "none", "speculative_config": "none"}
_GENERATED = re.compile(r"(<!-- generated: [\w ]+ -->\n).*?(<!-- end -->)", re.DOTALL)


def engine_options_table() -> str:
    rows = [
        (_code(_flag(option)), _code(option.name), _engine_default(option), fill_help(option.metadata["help"]))
        for option in fields(EngineOptions)
    ]
    return _table(("option", "in Python", "default", "what it does"), rows)


def settings_table(owner: type) -> str:
    """The table of a command's own settings."""
    rows = [
        (
            _code(_flag(option)),
            "none" if option.default in (None, "", ()) else _code(str(option.default)),
            option.metadata["help"],
        )
        for option in fields(owner)
    ]
    return _table(("option", "default", "what it does"), rows)


def sampling_parameters_table() -> str:
    nothing_said = SamplingParams()
    resolved = nothing_said.with_defaults(nothing_said)
    rows = [
        (
            _code(parameter.name),
            _type(parameter),
            _sampling_default(getattr(nothing_said, parameter.name), getattr(resolved, parameter.name)),
            parameter.metadata["help"],
        )
        for parameter in fields(SamplingParams)
        if parameter.name in PARAMETERS
    ]
    return _table(("parameter", "type", "default", "what it does"), rows)


def update(page: str, table: str) -> str:
    """The page with the table between its markers replaced."""
    updated, count = _GENERATED.subn(lambda markers: markers[1] + table + markers[2], page)
    if count != 1:
        raise ConfigError(
            f"the page has {count} generated tables; put one pair of '<!-- generated: ... -->' and '<!-- end -->' in it"
        )
    return updated


def tables() -> dict[str, str]:
    """The generated table of each page, by the page's name in ``docs``."""
    return {
        "configuration.md": engine_options_table(),
        "sampling.md": sampling_parameters_table(),
        "server.md": settings_table(ServerSettings),
        "serving-benchmark.md": settings_table(LoadSettings),
        "training.md": settings_table(TrainSettings),
    }


def main() -> int:
    checkout = Path(__file__).parents[2]
    if not (checkout / "pyproject.toml").is_file():
        sys.stderr.write(
            "error: the pages are in a checkout of Slipstream only; run this from there with `make docs`\n"
        )
        return 2
    for name, table in tables().items():
        path = checkout / "docs" / name
        path.write_text(update(path.read_text(encoding="utf-8"), table), encoding="utf-8")
        sys.stdout.write(f"docs/{name}\n")
    return 0


def _flag(option: Field[Any]) -> str:
    """As typed. A flag that is on by default is shown in the form that switches it off."""
    name = option.name.replace("_", "-")
    return f"--no-{name}" if option.default is True else f"--{name}"


def _type(parameter: Field[Any]) -> str:
    """The annotation without ``None``, which the default column shows."""
    return _code(str(parameter.type).removesuffix(" | None"))


def _engine_default(option: Field[Any]) -> str:
    return _UNSET.get(option.name, "chosen") if option.default is None else _code(str(option.default))


def _sampling_default(value: Any, resolved: Any) -> str:
    if value is None and resolved is not None:
        return f"the model's, else {_code(str(resolved))}"
    return "none" if value in (None, ()) else _code(str(value))


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", r"\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
