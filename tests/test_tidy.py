"""The tree stays readable: file and function sizes, names, docstrings, one reader of the environment."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import LONG_FILES as LONG_TESTS

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "slipstream").rglob("*.py"))
MAX_FILE_LINES = 400
# Files that are longer, by name, and why they are not cut.
LONG_FILES = {
    "decode_attention.py": "one kernel with its second pass, its launcher and its definition",
    "draft_inputs.py": "four operations that make a drafter's inputs, each with its definition, launcher and kernel",
    "draft_head.py": "what the kinds of draft heads share: reading, building and loading them",
    "flex.py": "one backend: its masks, its blocks and what compiles them",
    "small_linear.py": "one kernel in five variants that share their loads",
}
# Of all functions: so many in a hundred are at most so long. No single one is judged by its length, for a limit makes
# functions that are cut where it runs out; what makes a function hard to follow is how deeply it is nested.
SHORT_FUNCTIONS = {80: 15, 95: 35, 99: 60}
MAX_DEPTH = 4
# More arguments than that belong together in a bundle with named fields. Triton kernels take flat pointers; a command's
# parameters are its options.
MAX_PARAMETERS = 8
NOT_CALLED_BY_HAND = ("jit", "benchmarks.callback", "app.command")
# Plain structures for calls into C; bodies that the operations of another file launch.
UNTESTED_KERNELS = {"records", "exact_kernels"}
BANNED_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "v2"}
# Unfinished work is an issue, not a comment.
BANNED_WORDS = ("TODO", "FIXME", "XXX", "raise NotImplementedError")


@pytest.fixture(params=SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def source(request: pytest.FixtureRequest) -> Path:
    path = request.param
    assert isinstance(path, Path)
    return path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def depth_of(node: ast.AST, depth: int = 0) -> int:
    """How many blocks are around the innermost statement. An ``elif`` is not deeper than its ``if``."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        opens = isinstance(child, ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try)
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            deepest = max(deepest, depth_of(child, depth + (opens and not is_elif)))
    return deepest


def test_file_is_short(source: Path) -> None:
    if source.name not in LONG_FILES:
        assert len(source.read_text().splitlines()) <= MAX_FILE_LINES, "split it, or say in LONG_FILES why not"


def test_long_files_are_there() -> None:
    assert {path.name for path in SOURCES} >= LONG_FILES.keys()
    assert all(LONG_FILES.values())


def test_most_functions_are_short() -> None:
    nodes = [node for path in SOURCES for node in functions_of(path)]
    lengths = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)
    for share, most in SHORT_FUNCTIONS.items():
        assert lengths[len(lengths) * share // 100] <= most, (
            f"{share} of 100 functions should have at most {most} lines"
        )


def test_functions_are_flat(source: Path) -> None:
    for node in functions_of(source):
        assert depth_of(node) <= MAX_DEPTH, f"{node.name} is nested too deeply"


def test_functions_take_few_arguments(source: Path) -> None:
    for node in functions_of(source):
        if not any(ast.unparse(decorator).startswith(NOT_CALLED_BY_HAND) for decorator in node.decorator_list):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [a.arg for a in given if a.arg not in ("self", "cls")]
            assert len(names) <= MAX_PARAMETERS, f"{node.name} has {len(names)} parameters"


def test_arguments_are_not_packed_into_starred_tuples(source: Path) -> None:
    """``f(*(a, b), *(c, d))`` is a call whose arguments have lost their names to save lines."""
    starred = [node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Starred)]
    assert not [ast.unparse(node) for node in starred if isinstance(node.value, ast.Tuple)]


@pytest.mark.parametrize(
    ("code", "depth"),
    [
        ("def f():\n    return 1", 0),
        ("def f():\n    if a:\n        b\n    elif c:\n        d\n    else:\n        e", 1),
        ("def f():\n    for a in b:\n        if c:\n            with d:\n                e", 3),
        ("def f():\n    if a:\n        def g():\n            if b:\n                c\n", 1),
        ("def f():\n    if a:\n        b\n    else:\n        if c:\n            d\n        e", 2),
    ],
)
def test_depth(code: str, depth: int) -> None:
    assert depth_of(ast.parse(code).body[0]) == depth


def test_only_triton_bodies_have_no_types(source: Path) -> None:
    """The type checker lets functions without types pass where kernels are; nothing else may use that."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.FunctionDef) and not any(ast.unparse(d).startswith("jit") for d in node.decorator_list):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in given if a.annotation is None and a.arg not in ("self", "cls")]
            assert not bare and node.returns is not None, f"{node.name} has no types"


def test_name_says_something(source: Path) -> None:
    assert source.stem not in BANNED_NAMES


def test_module_says_what_it_knows(source: Path) -> None:
    assert ast.get_docstring(tree_of(source)), "a module starts with a docstring"


def test_only_config_reads_the_environment(source: Path) -> None:
    reads = [n for n in ast.walk(tree_of(source)) if getattr(n, "attr", "") in ("environ", "getenv")]
    assert not reads or source == ROOT / "slipstream" / "config.py"


def test_nothing_is_left_for_later(source: Path) -> None:
    text = source.read_text()
    assert not [word for word in BANNED_WORDS if word in text]


def test_the_fast_tests_cover_every_room() -> None:
    tests = ROOT / "tests"
    assert all((ROOT / path).is_file() for path in LONG_TESTS), "a file is not where the list has it"
    fast = {path for path in tests.rglob("test_*.py") if path.relative_to(ROOT).as_posix() not in LONG_TESTS}
    rooms = {path.name for path in (ROOT / "slipstream").iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= {path.parent.relative_to(tests).as_posix().split("/")[0] for path in fast} | {"assets"}


def test_every_kernel_file_has_a_test() -> None:
    kernels = {p.stem for p in (ROOT / "slipstream" / "kernels").rglob("*.py")} - {"__init__", *UNTESTED_KERNELS}
    tested = {p.stem.removeprefix("test_") for p in (ROOT / "tests" / "kernels").rglob("test_*.py")}
    assert kernels <= tested
