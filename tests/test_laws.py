"""`docs/laws.md` maps every law to tests that exist, or to the feature that will bring it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "laws.md").read_text()
# The number of each law, and its section: what it says, then a list of tests.
LAWS = re.findall(r"^## Law (\d+)\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
NUM_LAWS = 12
# Features whose code exists: a law may not be skipped for one of them.
BUILT = {"slipstream/speculate": "speculation"}


def test_every_law_is_on_the_page() -> None:
    assert [int(number) for number, _ in LAWS] == list(range(1, NUM_LAWS + 1))


@pytest.mark.parametrize(("number", "section"), LAWS, ids=[number for number, _ in LAWS])
def test_a_law_names_tests_that_exist_or_a_feature_that_does_not(number: str, section: str) -> None:
    if coming := re.search(r"^- comes with: (.*)$", section, re.MULTILINE):
        feature = coming[1]
        assert feature in BUILT.values()
        for folder, name in BUILT.items():
            assert name != feature or not (ROOT / folder).exists(), f"law {number}: {folder} is there; name its tests"
        return
    named = re.findall(r"`([^`]+)::([^`]+)`", section)
    assert named, f"law {number} names no test"
    for path, name in named:
        functions = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"law {number}: there is no {name} in {path}"
