from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from slipstream.commands import sampling_fields
from slipstream.commands.reference import engine_options_list, lists, sampling_parameters_list, update
from slipstream.config import EngineOptions
from slipstream.errors import ConfigError
from slipstream.sampling.registry import packaged
from slipstream.sampling_params import PARAMETERS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", lists())
def test_page_is_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert update(page, lists()[name]) == page, f"docs/{name} is out of date; run `make docs`"


def test_fields_of_sampling_operations_are_up_to_date() -> None:
    """What the operations' files declare is what ``SamplingParams`` has: default, range and help."""
    source = sampling_fields.PAGE.read_text(encoding="utf-8")
    assert sampling_fields.update(source) == source, "sampling_params.py is not up to date; run `make docs`"
    for operation in packaged():
        for declared in operation.parameters:
            assert PARAMETERS[declared.name] == declared


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (engine_options_list(), [f.name for f in fields(EngineOptions)]),
        (sampling_parameters_list(), [*PARAMETERS]),
    ],
)
def test_every_field_has_an_entry(text: str, names: list[str]) -> None:
    entries = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(names)
    for entry, name in zip(entries, names, strict=True):
        assert re.fullmatch(r"`[\w-]+` \(.*default: .+\): .+", " ".join(entry.split()))
        assert f"`{name}`" in entry


def test_update_replaces_what_is_between_the_markers() -> None:
    page = "before\n<!-- generated: some table -->\nold\n<!-- end -->\nafter\n"
    assert update(page, r"| \1 |" + "\n") == page.replace("old", r"| \1 |")


@pytest.mark.parametrize(
    "page", ["no markers", "<!-- generated: t -->\nno end", 2 * "<!-- generated: t -->\n<!-- end -->"]
)
def test_update_needs_one_pair_of_markers(page: str) -> None:
    with pytest.raises(ConfigError, match="one pair"):
        update(page, "table")


def test_lists_need_no_torch() -> None:
    code = "import slipstream.commands.reference as r, sys; r.lists(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
