"""Kinds of pooling are known to their own files: scheduler, engine, server and the rest of the runner name none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.pooling import KIND_NAMES, PoolingKind

PACKAGE = Path(__file__).parent.parent / "slipstream"
ROOMS = ("engine", "scheduler", "runner", "graphs", "device", "server", "sampling", "speculate", "attention", "kernels")
OWN = {PACKAGE / "runner" / "pool_head.py", PACKAGE / "kernels" / "step" / "pool.py"}
FILES = [p for room in ROOMS for p in sorted((PACKAGE / room).rglob("*.py")) if p not in OWN]
FILES += [PACKAGE / name for name in ("config.py", "request.py", "plan.py", "output.py", "columns.py")]


# One kind is called as many other things are.
NAMES = {*KIND_NAMES} - {"max"}


def names_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield node.value
        if isinstance(node, ast.ImportFrom):
            yield from {alias.name for alias in node.names} & {"PoolingKind", "KIND_NAMES"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_kind_is_named(path: Path) -> None:
    assert not list(names_in(path))


def test_the_test_finds_a_name(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    for line in ('if kind == "mean": pass', "from slipstream.pooling import PoolingKind"):
        path.write_text(line)
        assert list(names_in(path)), line
    assert KIND_NAMES[:4] == ("last", "cls", "mean", "max") and [int(kind) for kind in PoolingKind] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
