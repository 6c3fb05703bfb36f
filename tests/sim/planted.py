"""A planted fault: which code it changes, held by a function's name and a piece of its code, not by a line.

Code is compared token by token, so formatting, comments and moves between folders do not matter.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "slipstream"
_TOKEN = re.compile(r"""(?P<comment>\#[^\n]*)|(?P<string>[bfr]*(?:"[^"\n]*"|'[^'\n]*'))|\w+|[^\w\s]""")


class Mutation(NamedTuple):
    name: str
    where: str  # ``module:Class.function`` with the module's own name alone, or a file of the package
    code: str
    changed: str


class Place(NamedTuple):
    path: Path
    begin: int
    end: int


def tokens_of(text: str) -> list[tuple[str, int, int]]:
    """Each with its begin and end; commas that only formatting decides on are left out."""
    found = [(m[0], m.start(), m.end()) for m in _TOKEN.finditer(text) if m["comment"] is None]
    last = found[-1][0] if found else ""
    pairs = zip(found, [*(token for token, _, _ in found[1:]), last], strict=True)
    return [token for token, after in pairs if not (token[0] == "," and after in (")", "]", "}", ","))]


def find_function(source: str, qualified: str) -> tuple[int, int] | None:
    """Where a function or method begins and ends, as places in the text."""
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.AST | None = None
    for name in qualified.split("."):
        node = next((n for n in body if getattr(n, "name", None) == name), None)
        if node is None:
            return None
        body = getattr(node, "body", [])
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[node.lineno - 1], starts[node.end_lineno or node.lineno]


def find_places(mutation: Mutation) -> list[Place]:
    """Every place of the package that it names; one where the list is true."""
    if mutation.where.endswith(".py"):
        files, qualified = [PACKAGE / mutation.where], ""
    else:
        module, _, qualified = mutation.where.partition(":")
        files = sorted(PACKAGE.rglob(f"{module}.py"))
    wanted = [token for token, _, _ in tokens_of(mutation.code)]
    found = []
    for path in files:
        source = path.read_text()
        span = find_function(source, qualified) if qualified else (0, len(source))
        if span is None:
            continue
        own = tokens_of(source[span[0] : span[1]])
        for idx in range(len(own) - len(wanted) + 1):
            if [token for token, _, _ in own[idx : idx + len(wanted)]] == wanted:
                found.append(Place(path, span[0] + own[idx][1], span[0] + own[idx + len(wanted) - 1][2]))
    return found


def plant(mutation: Mutation) -> tuple[Path, str]:
    """The file it changes, as a path in the checkout, and its changed text."""
    places = find_places(mutation)
    if len(places) != 1:
        raise SystemExit(f"{mutation.name}: its code occurs {len(places)} times in {mutation.where}")
    path, begin, end = places[0]
    source, changed = path.read_text(), mutation.changed.strip().removesuffix(",")
    return path.relative_to(ROOT), source[:begin] + changed + source[end:]
