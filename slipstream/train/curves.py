"""Plots the curves of a training: loss, and acceptance on held-out texts by draft position."""

from __future__ import annotations

from pathlib import Path

from slipstream.train.trainer import Progress


def draw_curves(progress: Progress, path: Path, title: str) -> str | None:
    """Write the PNG; returns a line that says why if that is not possible."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return 'no picture of the curves: it needs matplotlib; pip install "slipstream[plots]"'
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = range(1, len(progress.losses) + 1)
    left.plot(steps, progress.losses, color="#d1d5db", linewidth=0.8)
    left.plot(steps, _smoothed(progress.losses), color="#2563eb", linewidth=1.5)
    left.set(xlabel="step", ylabel="cross entropy", title="loss")
    for position in range(len(progress.acceptance[-1])):
        shares = [100 * shares[position] for shares in progress.acceptance]
        right.plot(progress.measured_at, shares, marker=".", label=f"draft {position + 1}")
    right.set(xlabel="step", ylabel="% accepted with all before it", title="held-out texts, greedy", ylim=(0, 100))
    right.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path)
    return None


def _smoothed(values: list[float]) -> list[float]:
    """An exponential moving average with bias correction."""
    kept = 1 - 1 / max(1.0, min(50.0, len(values) / 30))
    smooth, weight, out = 0.0, 0.0, []
    for value in values:
        smooth, weight = kept * smooth + (1 - kept) * value, kept * weight + 1 - kept
        out.append(smooth / weight)
    return out
