from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from slipstream.commands import sampling_fields
from slipstream.commands.reference import engine_options_table, sampling_parameters_table, tables, update
from slipstream.config import EngineOptions
from slipstream.errors import ConfigError
from slipstream.sampling.registry import packaged
from slipstream.sampling_params import PARAMETERS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("name", tables())
def test_page_is_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert update(page, tables()[name]) == page, f"docs/{name} is out of date; run `make docs`"


def test_fields_of_sampling_operations_are_up_to_date() -> None:
    """What the operations' files declare is what ``SamplingParams`` has: default, range and help."""
    source = sampling_fields.PAGE.read_text(encoding="utf-8")
    assert sampling_fields.update(source) == source, "sampling_params.py is not up to date; run `make docs`"
    for operation in packaged():
        for declared in operation.parameters:
            assert PARAMETERS[declared.name] == declared


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (engine_options_table(), [f.name for f in fields(EngineOptions)]),
        (sampling_parameters_table(), [*PARAMETERS]),
    ],
)
def test_every_field_has_a_row_of_four_cells(table: str, names: list[str]) -> None:
    rows = table.splitlines()[2:]
    assert len(rows) == len(names)
    for row, name in zip(rows, names, strict=True):
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) == 4
        assert f"`{name}`" in row
        assert all(cell.strip() for cell in cells)


def test_update_replaces_what_stands_between_the_markers() -> None:
    page = "before\n<!-- generated: some table -->\nold\n<!-- end -->\nafter\n"
    assert update(page, r"| \1 |" + "\n") == page.replace("old", r"| \1 |")


@pytest.mark.parametrize(
    "page", ["no markers", "<!-- generated: t -->\nno end", 2 * "<!-- generated: t -->\n<!-- end -->"]
)
def test_update_wants_one_pair_of_markers(page: str) -> None:
    with pytest.raises(ConfigError, match="one pair"):
        update(page, "table")


def test_tables_need_no_torch() -> None:
    code = "import slipstream.commands.reference as r, sys; r.tables(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target = link.partition("#")[0]
        if target and "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {link}, which is not there"
