"""The bars of the README from result files of ``decode_throughput.py``: each batch beside vLLM's figure.

python benchmarks/plot_throughput.py benchmarks/results/*decode-throughput*.json --output docs/throughput.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from result_files import Result, newest_first
from vllm_figures import PLAIN, VERSION

BAR, GAP, LEFT, WIDTH = 16, 10, 210, 420
OWN, PEER = "#2563eb", "#9ca3af"
# A picture cannot see the colours of the page that shows it, but the reader's preference.
STYLE = "<style>text { fill: #374151 } @media (prefers-color-scheme: dark) { text { fill: #d1d5db } }</style>"


def newest_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The newest row of each case and batch that vLLM has a figure for, of runs like vLLM's with random weights."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for result in results:
        for row in result.rows:
            is_alike = (row.get("weights"), row.get("prompt_len"), row.get("output_len")) == ("random", 128, 256)
            if is_alike and row["batch"] in PLAIN.get(row["case"], {}):
                found.setdefault((row["case"], row["batch"]), row)
    cases = list(PLAIN)
    return [found[key] for key in sorted(found, key=lambda key: (cases.index(key[0]), key[1]))]


def text(x: float, y: float, label: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-family="sans-serif" font-size="12" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(label)}</text>'


def draw(rows: list[dict[str, Any]]) -> str:
    """Bars are relative to vLLM within each pair: batches differ by a factor of a hundred."""
    peers = [PLAIN[row["case"]][row["batch"]] for row in rows]
    widest = max([1.0, *(row["tok_s"] / peer for row, peer in zip(rows, peers, strict=True))])
    parts, y = [], 28
    parts.append(
        text(10, 16, f"output tokens per second, one NVIDIA H200: Slipstream (blue), {VERSION} (grey)", weight="bold")
    )
    for row, peer in zip(rows, peers, strict=True):
        parts.append(text(LEFT - 10, y + BAR + 4, f"{row['case']}, batch {row['batch']}", anchor="end"))
        for rate, share, colour in ((row["tok_s"], row["tok_s"] / peer, OWN), (peer, 1.0, PEER)):
            width = WIDTH * share / widest
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            parts.append(text(LEFT + width + 6, y + BAR - 4, f"{rate:,.0f}"))
            y += BAR
        y += GAP
    size = f'width="{LEFT + WIDTH + 80}" height="{y}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{STYLE}\n' + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/throughput.svg"))
    options = parser.parse_args()
    options.output.write_text(draw(newest_rows(newest_first(options.results))), encoding="utf-8")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
