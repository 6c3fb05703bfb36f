"""Damage to a JSON document: extreme numbers and wrong types at every path, and keys that go, come twice or move."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

EXTREMES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 255, 1 << 15, 1 << 16, 1 << 20, 1 << 23, 1 << 24, (1 << 24) + 1),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**30),
    *(0.5, 1.5, -0.5, 1e-300, 1e308, float("nan"), float("inf"), -float("inf")),
)
_DEEP = "@deep@"  # written as lists in lists, which Python itself would not write
WRONG_TYPES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "-1", "x" * 10_000, "\ud800", "a\nb", [], {}, [[]], [None], [1], ["x"], [{}]),
    *({"a": 1}, {"content": 5}, [1, "x"], [-1] * 3, [1 << 40] * 3, [True] * 4, _DEEP),
)
Path = tuple[str | int, ...]


def damage_json(rng: random.Random, text: str) -> tuple[str, str]:
    """The text of the document after one or two changes, and what they were."""
    document, notes = json.loads(text), []
    for _ in range(rng.choice((1, 1, 1, 2))):
        document, note = _change(rng, document)
        notes.append(note)
    return write(document), "; ".join(notes)


def write(document: Any) -> str:
    return json.dumps(document).replace(f'"{_DEEP}"', "[" * 500 + "]" * 500)


def _change(rng: random.Random, document: Any) -> tuple[Any, str]:
    paths = list(_paths(document))
    # Documents with a large vocabulary are damaged mostly outside of it.
    short = [path for path in paths if len(path) <= 2] if rng.random() < 0.5 else paths
    path = rng.choice(short or paths)
    kind = rng.choice(("extreme", "extreme", "type", "type", "remove", "rename", "move"))
    if not path or kind in ("extreme", "type"):
        value = copy.deepcopy(rng.choice(EXTREMES if kind == "extreme" else WRONG_TYPES))
        return _replaced(document, path, value), f"{_spell(path)} = {str(value)[:40]!a}"
    parent = _at(document, path[:-1])
    if kind == "move":
        value = _at(document, rng.choice(paths))
        return _replaced(document, path, copy.deepcopy(value)), f"{_spell(path)} = another value"
    value = parent.pop(path[-1])
    if kind == "rename" and isinstance(parent, dict):
        parent[rng.choice(("", "self", f"{path[-1]}x", "\ud800", "model"))] = value
    return document, f"{kind} {_spell(path)}"


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _paths(child, (*path, key))


def _at(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document


def _replaced(document: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    _at(document, path[:-1])[path[-1]] = value
    return document


def _spell(path: Path) -> str:
    return ascii("/".join(map(str, path)))[:80]
