"""Tokens per second over the batch from result files of ``speculative_throughput.py``, as a PNG.

Beside every draft length: plain decoding, vLLM's points, and the limit that the memory's bandwidth sets, where a step
reads each weight of target and head once and nothing else takes time.

    python benchmarks/plot_speculation.py benchmarks/results/*speculative-throughput*.json --output docs/speculation.png

Needs matplotlib: pip install "slipstream[plots]".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result_files import Result, newest_first
from slipstream.models.shapes import FORCED_RATES, step_bytes
from vllm_figures import EAGLE3_K, eagle3_peer

BANDWIDTH = 4.8e12  # bytes a second, NVIDIA H200
COLORS = {"0": "#6b7280", "3": "#2563eb", "adaptive": "#dc2626"}
PALE = {"1": "#93c5fd", "2": "#67e8f9", "4": "#86efac", "5": "#fcd34d", "6": "#fdba74", "7": "#d8b4fe"}


def newest_rows(results: Sequence[Result], shape: str) -> dict[str, dict[int, dict[str, Any]]]:
    """The newest row of every draft length and batch at the high rates.

    The figure compared with vLLM is the better of several runs; the sweep over all lengths is for the other curves.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for result in results:
        for row in result.rows:
            is_own = row["case"].split("+")[0] == shape
            is_quick = str(row.get("k")) in COLORS and row.get("num_runs", 2) < 2
            if is_own and not is_quick and "k" in row and row.get("rates", "high") == "high":
                found.setdefault(str(row["k"]), {}).setdefault(row["batch"], row)
    return found


def limit(shape: str, k: int, batch: int) -> float:
    """Tokens per second if a step only had to read the weights."""
    return batch * (1 + sum(FORCED_RATES[:k])) * BANDWIDTH / step_bytes(shape, k)


def draw(found: dict[str, dict[int, dict[str, Any]]], shape: str, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=130)
    for k, rows in sorted(found.items()):
        batches = sorted(rows)
        if len(batches) == 1 and k not in COLORS:  # a single point is no curve
            continue
        name = "plain" if k == "0" else "adaptive" if k == "adaptive" else f"k = {k}"
        color, width = COLORS.get(k, PALE.get(k)), 2.2 if k in COLORS else 1.0
        rates = [rows[b]["tok_s"] for b in batches]
        axes.plot(batches, rates, marker="o", ms=4, lw=width, color=color, label=f"Slipstream, {name}")
    for k, marker in (("0", "x"), (EAGLE3_K, "^")):
        name = "plain" if k == "0" else f"k = {k}"
        batches = sorted(found.get(k, {}))
        peers = {b: peer for b in batches if (peer := eagle3_peer(shape, k, b))}
        if peers:
            at, rates = [*peers], [*peers.values()]
            axes.scatter(at, rates, marker=marker, s=60, color="black", zorder=3, label=f"vLLM, {name}")
        if batches:
            limits = [limit(shape, int(k), b) for b in batches]
            axes.plot(batches, limits, ls=":", lw=1.2, color=COLORS[k], label=f"limit of the bandwidth, {name}")
    axes.set(xscale="log", yscale="log", xlabel="requests in the batch", ylabel="output tokens per second")
    axes.set_xscale("log", base=2)
    axes.set_title(f"{shape} shape with an EAGLE-3 head, forced acceptance, NVIDIA H200")
    axes.grid(visible=True, which="both", lw=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    # Without the library's version, so that the same results give the same file.
    figure.savefig(output, metadata={"Software": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    found = newest_rows(newest_first(arguments.results), arguments.shape)
    if not found:
        print(f"error: no rows of {arguments.shape} in {len(arguments.results)} files", file=sys.stderr)
        return 2
    try:
        draw(found, arguments.shape, arguments.output)
    except ImportError:
        print('error: plots need matplotlib; pip install "slipstream[plots]"', file=sys.stderr)
        return 2
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
