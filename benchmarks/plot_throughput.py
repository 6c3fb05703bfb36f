"""The bars of the README from result files of ``decode_throughput.py``: each batch beside vLLM's figure.

python benchmarks/plot_throughput.py benchmarks/results/*decode-throughput*.json --output docs/throughput.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

BAR, GAP, LEFT, WIDTH = 16, 10, 210, 420
OWN, PEER, INK = "#2563eb", "#9ca3af", "#374151"


def newest_rows(paths: list[Path]) -> list[dict[str, Any]]:
    """The newest row of each case and batch; file names begin with their date."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(paths, key=lambda p: p.name):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row.get("vllm_tok_s"):
                found[row["case"], row["batch"]] = row
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != "smollm2-135m", key[0], key[1]))]


def text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-family="sans-serif" font-size="12" font-weight="{weight}" fill="{INK}" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(words)}</text>'


def draw(rows: list[dict[str, Any]]) -> str:
    """Bars are relative to vLLM within each pair: batches differ by a factor of a hundred."""
    widest = max(max(row["ratio"] for row in rows), 1.0)
    parts, y = [], 28
    parts.append(
        text(10, 16, "output tokens per second, one NVIDIA H200: Slipstream (blue), vLLM 0.26.0 (grey)", weight="bold")
    )
    for row in rows:
        parts.append(text(LEFT - 10, y + BAR + 4, f"{row['case']}, batch {row['batch']}", anchor="end"))
        for rate, share, colour in ((row["tok_s"], row["ratio"], OWN), (row["vllm_tok_s"], 1.0, PEER)):
            width = WIDTH * share / widest
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            parts.append(text(LEFT + width + 6, y + BAR - 4, f"{rate:,.0f}"))
            y += BAR
        y += GAP
    size = f'width="{LEFT + WIDTH + 80}" height="{y}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/throughput.svg"))
    options = parser.parse_args()
    options.output.write_text(draw(newest_rows(options.results)), encoding="utf-8")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
