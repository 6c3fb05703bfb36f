"""Which private names of the package the tests reach for: ``python -m tests.private_names [--where]``.

A test that does so knows how something is built, and has to be changed with it. Names that Python itself gives to
tuples are not private in that sense.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
_OF_TUPLES = {"_replace", "_asdict", "_make", "_fields"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _OF_TUPLES


def private_names_of_the_package() -> set[str]:
    names = set()
    for path in (ROOT / "slipstream").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found = (getattr(node, key, None) for key in ("name", "attr", "id", "arg"))
            names |= {name for name in found if isinstance(name, str) and is_private(name)}
    return names


def uses_in(tree: ast.AST, known: set[str]) -> Iterator[tuple[str, int]]:
    """Attributes of others, imports, and names given to ``setattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in known:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream"):
            yield from ((alias.name, node.lineno) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "delattr", "setitem"):
            texts = (argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant))
            names = (text.rpartition(".")[2] for text in texts if isinstance(text, str))
            yield from ((name, node.lineno) for name in names if name in known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", action="store_true", help="each place, too")
    options = parser.parse_args()
    known, counts = private_names_of_the_package(), Counter[str]()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name, line in uses_in(ast.parse(path.read_text()), known):
            counts[name] += 1
            if options.where:
                print(f"{path.relative_to(ROOT)}:{line}: {name}")
    for name, count in counts.most_common():
        print(f"{count:4} {name}")
    print(f"{counts.total()} uses of {len(counts)} private names")


if __name__ == "__main__":
    main()
