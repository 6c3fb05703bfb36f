"""What ``spec_bench.py`` shows of its rows: a table and bars for each temperature, and every text that differs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.commands.results import Row


def label(row: Row) -> str:
    method = str(row["case"].split("+")[-1])
    return f"{method}, k = {row['k']}" if isinstance(row["k"], int) and row["k"] else method


def print_tables(rows: Sequence[Row], title: str) -> None:
    for temperature in dict.fromkeys(r["temperature"] for r in rows):
        table = Table("method", "questions", title=f"{title}, temperature {temperature:g}")
        # Short enough for the longest kind and "eagle3, k = 16" to stay in one line.
        for name in ("batch", "accepted", "a step", "tokens/s", "plain", "speed-up", "same", "ties"):
            table.add_column(name, justify="right")
        for r in rows:
            if r["temperature"] == temperature:
                lengths = (f"{r['accepted_length']:.2f}", f"{r['tokens_a_step']:.2f}")
                rates = (f"{r['tok_s']:,.0f}", f"{r['plain_tok_s']:,.0f}", f"{r['ratio']:.2f}")
                texts = (f"{r['same_texts']} of {r['num_texts']}", str(r["near_ties"]))
                table.add_row(label(r), r["kind"], str(r["batch"]), *lengths, *rates, *texts)
        Console(width=120).print(table)


def print_difference(row: Row) -> None:
    verdict = "a near-tie" if row["near_tie"] else "A FAULT"
    gap = "no gap" if row["gap"] is None else f"gap {row['gap']:.3f}"
    case = f"{row['method']}, temperature {row['temperature']:g}, batch {row['batch']}, {row['kind']}"
    print(f"{case}, token {row['place']}: {row['drafted']!r} for {row['plain']!r}, {gap}, {verdict}")


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Speed-up by kind of question, a bar for each method and batch; one picture above the other by temperature."""
    try:
        import matplotlib
    except ImportError:
        print('no picture: plots need matplotlib; pip install "slipstream[plots]"', file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    temperatures = list(dict.fromkeys(r["temperature"] for r in rows))
    kinds = list(dict.fromkeys(r["kind"] for r in rows))
    groups = list(dict.fromkeys((label(r), r["batch"]) for r in rows))
    figure, stack = plt.subplots(len(temperatures), figsize=(10, 4.5 * len(temperatures)), dpi=130, squeeze=False)
    for axes, temperature in zip(stack[:, 0], temperatures, strict=True):
        for i, (method, batch) in enumerate(groups):
            own = {
                r["kind"]: r for r in rows if (label(r), r["batch"], r["temperature"]) == (method, batch, temperature)
            }
            positions = [j + (i - (len(groups) - 1) / 2) * 0.8 / len(groups) for j in range(len(kinds))]
            heights = [own[kind]["ratio"] for kind in kinds]
            bars = axes.bar(positions, heights, 0.8 / len(groups), label=f"{method}, batch {batch}")
            axes.bar_label(bars, [f"{own[kind]['accepted_length']:.1f}" for kind in kinds], fontsize=6, padding=1)
        axes.axhline(1.0, color="black", lw=0.8)
        axes.set_xticks(range(len(kinds)), kinds, rotation=15)
        axes.set(ylabel="speed-up (above: accepted length)", title=f"{title}, temperature {temperature:g}")
        axes.legend(fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    print(f"picture: {path}")
