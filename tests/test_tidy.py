"""The tree stays readable: file and function sizes, names, docstrings, one reader of the environment."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "slipstream").rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
BANNED_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "v2"}
# Unfinished work is an issue, not a comment.
BANNED_WORDS = ("TODO", "FIXME", "XXX", "raise NotImplementedError")


@pytest.fixture(params=SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def source(request: pytest.FixtureRequest) -> Path:
    path = request.param
    assert isinstance(path, Path)
    return path


def test_file_is_short(source: Path) -> None:
    assert len(source.read_text().splitlines()) <= MAX_FILE_LINES


def test_functions_are_short(source: Path) -> None:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_only_triton_bodies_have_no_types(source: Path) -> None:
    """The type checker lets functions without types pass where kernels are; nothing else may use that."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef) and not any(ast.unparse(d).startswith("jit") for d in node.decorator_list):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in given if a.annotation is None and a.arg not in ("self", "cls")]
            assert not bare and node.returns is not None, f"{node.name} has no types"


def test_name_says_something(source: Path) -> None:
    assert source.stem not in BANNED_NAMES


def test_module_says_what_it_knows(source: Path) -> None:
    assert ast.get_docstring(ast.parse(source.read_text())), "a module starts with a docstring"


def test_only_config_reads_the_environment(source: Path) -> None:
    reads = [n for n in ast.walk(ast.parse(source.read_text())) if getattr(n, "attr", "") in ("environ", "getenv")]
    assert not reads or source == ROOT / "slipstream" / "config.py"


def test_nothing_is_left_for_later(source: Path) -> None:
    text = source.read_text()
    assert not [word for word in BANNED_WORDS if word in text]


def test_every_kernel_file_has_a_test() -> None:
    kernels = {p.stem for p in (ROOT / "slipstream" / "kernels").glob("*.py")} - {"__init__"}
    tested = {p.stem.removeprefix("test_") for p in (ROOT / "tests" / "kernels").glob("test_*.py")}
    assert kernels <= tested
