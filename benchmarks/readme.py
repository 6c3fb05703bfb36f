"""The figures of README.md and docs/benchmarks.md, written from the result files: parts between markers, two pictures.

    python benchmarks/readme.py    # or `make readme`; a test compares

A figure comes from the newest result that has it, of the right benchmark on the right machine. A part without a result
is left empty. What vLLM reached is in ``vllm_figures.py``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import plot_speculation
import plot_throughput
from figures import GPU, SHAPE, Results
from figures_decoding import adaptive_lengths, decode_throughput, eagle3, headline, one_stream
from figures_drafts import acceptance, ngram, real_pair, same_texts, spec_bench
from figures_serving import arrivals, attention, cpu, host, serving, startup
from result_files import newest_first, select
from slipstream.errors import ConfigError

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- generated: ([\w ,-]+) -->\n?)(.*?)(<!-- end -->)", re.DOTALL)

Parts = dict[str, Callable[[Results], str]]
PAGES: dict[str, Parts] = {
    "README.md": {"headline": headline},
    "docs/benchmarks.md": {
        "one stream": one_stream,
        "spec bench, one stream": partial(spec_bench, batch=1),
        "same texts": same_texts,
        "acceptance": acceptance,
        "decode throughput": decode_throughput,
        "eagle3": eagle3,
        "adaptive lengths": adaptive_lengths,
        "ngram": ngram,
        "spec bench, a batch": partial(spec_bench, batch=32),
        "serving": serving,
        "arrivals": arrivals,
        "attention": attention,
        "host": host,
        "startup": startup,
        "cpu": cpu,
        "a real pair": real_pair,
    },
}


def update(page: str, parts: Parts, results: Results) -> str:
    """The page with each part between its markers, in place of what was there."""
    names = [match[2] for match in MARKED.finditer(page)]
    if sorted(names) != sorted(parts):
        wrong = [name for name in parts if names.count(name) != 1] or sorted(set(names) - set(parts))
        raise ConfigError(f"the page must have '<!-- generated: {wrong[0]} -->' once if it is a part, else not at all")

    def fill(match: re.Match[str]) -> str:
        try:
            return match[1] + parts[match[2]](results) + match[4]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a row for the part '{match[2]}' lacks or misspells {error}") from error

    return MARKED.sub(fill, page)


def pictures(results: Results, folder: Path) -> list[Path]:
    """Redrawn where there are results for them."""
    drawn = []
    if rows := plot_throughput.newest_rows(select(results, "decode-throughput", GPU)):
        drawn.append(folder / "throughput.svg")
        drawn[-1].write_text(plot_throughput.draw(rows), encoding="utf-8")
    if found := plot_speculation.newest_rows(select(results, "speculative-throughput", GPU), SHAPE):
        drawn.append(folder / "speculation.png")
        plot_speculation.draw(found, SHAPE, drawn[-1])
    return drawn


def main() -> int:
    try:
        results = newest_first((ROOT / "benchmarks" / "results").glob("*.json"))
        written: list[Any] = []
        for name, parts in PAGES.items():
            page = ROOT / name
            page.write_text(update(page.read_text(encoding="utf-8"), parts, results), encoding="utf-8")
            written.append(page)
        written += pictures(results, ROOT / "docs")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print('error: the pictures need matplotlib; pip install "slipstream[plots]"', file=sys.stderr)
        return 2
    for path in written:
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
