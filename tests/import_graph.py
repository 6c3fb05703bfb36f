"""Which room imports which, and how often: ``python -m tests.import_graph [--svg FILE] [--modules ROOM]``.

A room is a folder of the package, or a module at its root. Rooms are listed from the top of the house down, as
``tests/test_import_direction.py`` has them; an edge that points upward is marked.
"""

from __future__ import annotations

import argparse
import ast
import html
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.test_import_direction import PACKAGE, RANK, room_of

_BOX_WIDTH, _BOX_HEIGHT, _GAP = 170, 26, 14


def imports_between_modules() -> Iterator[tuple[Path, str]]:
    """Each import statement of the package that names the package, as (file, module)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE.name):
                for alias in node.names if node.module == PACKAGE.name else node.names[:1]:
                    # A room can be imported from the package itself.
                    yield path, f"{node.module}.{alias.name}" if node.module == PACKAGE.name else node.module
            elif isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names if alias.name.startswith(PACKAGE.name + "."))


def count_edges() -> Counter[tuple[str, str]]:
    """Import statements from one room to another."""
    edges: Counter[tuple[str, str]] = Counter()
    for path, module in imports_between_modules():
        room, other = room_of(path), module.split(".")[1]
        if room != other and room != "__init__" and other in RANK:
            edges[room, other] += 1
    return edges


def as_text(edges: Counter[tuple[str, str]]) -> str:
    rooms = sorted({room for edge in edges for room in edge}, key=lambda room: (RANK[room], room))
    lines = []
    for room in rooms:
        below = sorted(((RANK[b], b, n) for (a, b), n in edges.items() if a == room))
        words = [f"{other} {n}{' (upward)' if RANK[other] < RANK[room] else ''}" for _, other, n in below]
        lines.append(f"{room}: {', '.join(words) or '-'}")
    return "\n".join([*lines, f"{len(rooms)} rooms, {len(edges)} edges, {edges.total()} imports"])


def as_svg(edges: Counter[tuple[str, str]]) -> str:
    """Rooms from top to bottom; an arc for each edge, wider where there are more imports."""
    rooms = sorted({room for edge in edges for room in edge}, key=lambda room: (RANK[room], room))
    middle = {room: idx * (_BOX_HEIGHT + _GAP) + _GAP + _BOX_HEIGHT // 2 for idx, room in enumerate(rooms)}
    height, width = len(rooms) * (_BOX_HEIGHT + _GAP) + _GAP, 2 * _BOX_WIDTH + 360
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">'
    ]
    for (room, other), count in sorted(edges.items()):
        top, bottom = middle[room], middle[other]
        reach, side = 10 + abs(bottom - top) * 0.33, _BOX_WIDTH + 8
        colour = "#c0392b" if RANK[other] < RANK[room] else "#5b7fa6"
        path = f"M{side} {top} C{side + reach} {top} {side + reach} {bottom} {side} {bottom}"
        title = html.escape(f"{room} imports {other} {count} times")
        line_width = min(6, 0.5 + count / 8)
        parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-opacity="0.5" stroke-width="{line_width:.1f}">'
            f"<title>{title}</title></path>"
        )
    for room, y in middle.items():
        parts.append(
            f'<rect x="8" y="{y - _BOX_HEIGHT // 2}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="4" fill="#eef2f7" '
            f'stroke="#8aa0b8"/><text x="18" y="{y + 5}">{html.escape(room)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, help="also write a picture")
    parser.add_argument("--modules", metavar="ROOM", help="the modules of this room and what they import elsewhere")
    options = parser.parse_args()
    if options.modules:
        for path, module in imports_between_modules():
            if room_of(path) == options.modules and module.split(".")[1] != options.modules:
                print(f"{path.relative_to(PACKAGE)} <- {module}")
        return
    edges = count_edges()
    print(as_text(edges))
    if options.svg:
        options.svg.write_text(as_svg(edges))


if __name__ == "__main__":
    main()
