"""The reference lists of the documentation, made from the dataclasses that define options and parameters.

``python -m slipstream.commands.reference`` writes them into the pages of a checkout; a test compares them, so that a
page cannot differ from the code. Knows Markdown and nothing of what the options do.
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from slipstream.config import EngineOptions
from slipstream.errors import ConfigError
from slipstream.load.settings import LoadSettings
from slipstream.sampling_params import PARAMETERS, SamplingParams
from slipstream.server.settings import ServerSettings
from slipstream.speculate.options import fill_help
from slipstream.train.settings import BlockSettings, TrainSettings

# What an engine option is if it is not set and nothing is derived from the model and the machine.
_UNSET = {"speculate": "none", "k": "the method's", "draft_model": "none", "speculative_config": "none"}
_UNSET["mixed_prefill_tokens"] = "none"
_WIDTH = 120
_GENERATED = re.compile(r"(<!-- generated: [\w ]+ -->\n).*?(<!-- end -->)", re.DOTALL)


def engine_options_list() -> str:
    return "".join(
        _entry(
            _flag(option),
            f"in Python {_code(option.name)}; default: {_engine_default(option)}",
            fill_help(option.metadata["help"]),
        )
        for option in fields(EngineOptions)
    )


def settings_list(owner: type, but: type | None = None) -> str:
    """Of a command's own settings; without those that it has exactly as another."""
    known = {} if but is None else {option.name: option.default for option in fields(but)}
    return "".join(
        _entry(
            _flag(option),
            f"default: {'none' if option.default in (None, '', ()) else _code(str(option.default))}",
            option.metadata["help"],
        )
        for option in fields(owner)
        if option.name not in known or known[option.name] != option.default
    )


def training_list() -> str:
    """Of both trainings: what the second has as the first is not repeated."""
    others = "`slipstream train dflash` has the same but `--draft-vocab` and `--draft-steps`, and these:"
    return f"{settings_list(TrainSettings)}\n{others}\n\n{settings_list(BlockSettings, TrainSettings)}"


def sampling_parameters_list() -> str:
    unset = SamplingParams()
    resolved = unset.with_defaults(unset)
    return "".join(
        _entry(
            parameter.name,
            f"{_type(parameter)}; default: "
            f"{_sampling_default(getattr(unset, parameter.name), getattr(resolved, parameter.name))}",
            parameter.metadata["help"],
        )
        for parameter in fields(SamplingParams)
        if parameter.name in PARAMETERS
    )


def update(page: str, text: str) -> str:
    """The page with the list between its markers replaced."""
    updated, count = _GENERATED.subn(lambda markers: markers[1] + text + markers[2], page)
    if count != 1:
        raise ConfigError(
            f"the page has {count} generated lists; put one pair of '<!-- generated: ... -->' and '<!-- end -->' in it"
        )
    return updated


def lists() -> dict[str, str]:
    """The generated list of each page, by the page's name in ``docs``."""
    return {
        "configuration.md": engine_options_list(),
        "sampling.md": sampling_parameters_list(),
        "server.md": settings_list(ServerSettings),
        "serving-benchmark.md": settings_list(LoadSettings),
        "training.md": training_list(),
    }


def main() -> int:
    checkout = Path(__file__).parents[2]
    if not (checkout / "pyproject.toml").is_file():
        sys.stderr.write(
            "error: the pages are in a checkout of Slipstream only; run this from there with `make docs`\n"
        )
        return 2
    for name, text in lists().items():
        path = checkout / "docs" / name
        path.write_text(update(path.read_text(encoding="utf-8"), text), encoding="utf-8")
        sys.stdout.write(f"docs/{name}\n")
    return 0


def _flag(option: Field[Any]) -> str:
    """As typed. A flag that is on by default is shown in the form that switches it off."""
    name = option.name.replace("_", "-")
    return f"--no-{name}" if option.default is True else f"--{name}"


def _type(parameter: Field[Any]) -> str:
    """The annotation without ``None``, which the default shows."""
    return _code(str(parameter.type).removesuffix(" | None"))


def _engine_default(option: Field[Any]) -> str:
    return _UNSET.get(option.name, "chosen") if option.default is None else _code(str(option.default))


def _sampling_default(value: Any, resolved: Any) -> str:
    if value is None and resolved is not None:
        return f"the model's, else {_code(str(resolved))}"
    return "none" if value in (None, ()) else _code(str(value))


def _code(text: str) -> str:
    return f"`{text}`"


def _entry(name: str, details: str, text: str) -> str:
    """One item of a list. Code is kept in one line."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), f"{_code(name)} ({details}): {text}")
    filled = textwrap.fill(
        whole, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return filled.replace("\0", " ") + "\n"


if __name__ == "__main__":
    sys.exit(main())
