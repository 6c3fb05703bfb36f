"""A plot of a measurement: distributions of TTFT and of the time between tokens, and throughput over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import ConfigError
from slipstream.load.figures import output_tokens, take_samples
from slipstream.load.records import FLOATS, Records

_BINS = 60
# Events of one read have no time between them, which a logarithmic axis cannot show: they are drawn at this value.
_LEAST_MS = 0.01
_MOST_POINTS = 2000  # of one curve; more cannot be distinguished


def check_plots(path: Path) -> None:
    """Check before the measurement that a plot can be drawn and written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--png needs matplotlib; install it with: pip install 'slipstream[plots]'") from error
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--png must be a file such as run.png, not '{path}'")
    if not path.parent.is_dir():
        raise ConfigError(f"--png {path}: there is no folder {path.parent}")


def rate_over_time(records: Records, num_bins: int = _BINS) -> tuple[FLOATS, FLOATS]:
    """Edges of equal time bins, in seconds, and output tokens per second in each.

    Events are weighted so that those of a request add up to its tokens.
    """
    num_events = records.num_events[records.is_ok]
    tokens = output_tokens(records)
    weights = np.repeat(tokens / np.maximum(num_events, 1), num_events)
    stop = float(records.event_times.max(initial=0.0)) or 1.0
    counts, edges = np.histogram(records.event_times, num_bins, (0.0, stop), weights=weights)
    return edges, counts / np.diff(edges)


def distribution(values: FLOATS) -> tuple[FLOATS, FLOATS]:
    """Sorted values and their cumulative share, thinned out evenly where there are very many."""
    values = np.sort(values[~np.isnan(values)])
    shares = np.arange(1, len(values) + 1) / max(len(values), 1)
    if len(values) > _MOST_POINTS:
        kept = np.unique(np.linspace(0, len(values) - 1, _MOST_POINTS).astype(int))
        values, shares = values[kept], shares[kept]
    return values, shares


def draw(path: Path, runs: Sequence[tuple[str, Records]], title: str) -> None:
    """One curve for each run in each of the three parts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    first, between, rates = figure.subplots(1, 3)
    for name, records in runs:
        samples = take_samples(records)
        for axes, values in ((first, samples.ttft), (between, samples.itl)):
            times, shares = distribution(values)
            axes.plot(np.maximum(times, _LEAST_MS), shares, label=name, drawstyle="steps-post")
        edges, rate = rate_over_time(records)
        rates.stairs(rate, edges, label=name)
    _label(first, "time to first token", "ms", "share of requests")
    _label(between, "time between tokens", "ms", "share of gaps")
    _label(rates, "output tokens per second", "seconds", "")
    for axes in (first, between):
        axes.set_ylim(0, 1.02)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))  # plain numbers too
    rates.set_xlim(left=0)
    rates.set_ylim(bottom=0)
    first.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _label(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
