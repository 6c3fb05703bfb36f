"""Every import of our own leads somewhere, in the benchmarks too, which no type checker reads and few tests run."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OWN = ("slipstream", "tests")
FILES = sorted(path for folder in (*OWN, "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def file_of(module: str) -> Path | None:
    place = ROOT / module.replace(".", "/")
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def names_of(path: Path) -> set[str]:
    """What a module binds anywhere; a name in a function too many does no harm here."""
    tree = ast.parse(path.read_text())
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return names | {alias.asname or alias.name for node in imported for alias in node.names}


def missing(module: str, names: list[str]) -> list[str]:
    path = file_of(module)
    if path is None:
        return [module]
    if "__getattr__" in names_of(path):
        return []  # it imports when it is asked
    return [f"{module}.{n}" for n in names if n not in names_of(path) and file_of(f"{module}.{n}") is None]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_own_imports_are_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in OWN:
            assert not missing(node.module or "", [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] not in OWN or file_of(alias.name)


def test_a_missing_name_is_found() -> None:
    assert missing("slipstream.no_such_module", ["x"]) == ["slipstream.no_such_module"]
    assert missing("slipstream.errors", ["ConfigError", "NoSuchError"]) == ["slipstream.errors.NoSuchError"]
