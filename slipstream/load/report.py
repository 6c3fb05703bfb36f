"""Results for the terminal: one run as a table, two runs side by side, and warnings about the measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from slipstream.errors import ConfigError
from slipstream.load.figures import BUSY, METRICS, PERCENTILES, Row

_METRIC_NAMES = {
    "ttft": "time to first token",
    "itl": "time between tokens",
    "tpot": "time per output token",
    "e2e": "end to end",
}
_RATES = (("output tokens per second", "tok_s", "{:,.1f}"), ("requests per second", "request_s", "{:,.2f}"))
_STATISTICS = ("mean", *(f"p{percent}" for percent in PERCENTILES))
# Requests sent later than this after they were due are not the load that was asked for.
_LATE_MS = 20.0


def table(rows: Sequence[Row], title: str) -> Table:
    """One column for each row of the result, one line for each figure."""
    shown = Table("", title=title)
    for row in rows:
        shown.add_column(point_name(row), justify="right")

    def add(name: str, cell: Callable[[Row], str], *, last: bool = False) -> None:
        shown.add_row(name, *(cell(row) for row in rows), end_section=last)

    for name, field, form in _RATES:
        add(name, lambda row, field=field, form=form: _cell(row.get(field), form))  # type: ignore[misc]
    if any("goodput_request_s" in row for row in rows):
        add("  within the limits", _goodput_cell)
    add("requests, and failed", _requests_cell, last=True)
    for metric, name in _METRIC_NAMES.items():
        for statistic in _STATISTICS:
            label = f"{name}, ms: {statistic}" if statistic == "mean" else f"  {statistic}"
            field = f"{metric}_{statistic}_ms"
            add(
                label,
                lambda row, field=field: _cell(row.get(field), "{:,.1f}"),  # type: ignore[misc]
                last=statistic == _STATISTICS[-1],
            )
    add("prompt tokens, mean", lambda row: _cell(row.get("prompt_tokens_mean"), "{:,.0f}"))
    add("output tokens, counted by", lambda row: f"{row['output_tokens']:,}, {row['tokens_counted_by']}")
    add("client, share of a core", lambda row: " ".join(f"{share:.0%}" for share in row["client_cpu"]))
    return shown


def warnings(rows: Sequence[Row]) -> list[str]:
    """Conditions under which the figures are not those of the server alone."""
    found = []
    for row in rows:
        name = point_name(row)
        if row["failed"]:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in row.get("failures", {}).items())
            found.append(f"{name}: {row['failed']} of {row['failed'] + row['requests']} requests failed: {reasons}")
        if max(row["client_cpu"], default=0.0) > BUSY:
            found.append(
                f"{name}: a client process was busy for {max(row['client_cpu']):.0%} of the time, so the client may be "
                f"the limit; give --processes more than {len(row['client_cpu'])}"
            )
        if (row["late_p99_ms"] or 0.0) > _LATE_MS:
            found.append(
                f"{name}: requests were sent up to {row['late_p99_ms']:,.0f} ms late (p99); use more processes"
            )
    return found


def compare(first: Sequence[Row], second: Sequence[Row], names: tuple[str, str]) -> Table:
    """Both runs side by side, with ratios of the second to the first, for each load in either."""
    shown = Table("load", title=f"a is {names[0]}, b is {names[1]}")
    shown.add_column("figure", no_wrap=True)
    for name in ("a", "b", "b to a"):
        shown.add_column(name, justify="right")
    ours, theirs = ({_load(row): row for row in rows} for rows in (first, second))
    for load in dict.fromkeys((*ours, *theirs)):
        pair = (ours.get(load, {}), theirs.get(load, {}))
        lines = [(label, field, form) for label, field, form in (*_RATES, *_compared())]
        lines = [line for line in lines if any(row.get(line[1]) is not None for row in pair)]
        for idx, (label, field, form) in enumerate(lines):
            values = [row.get(field) for row in pair]
            cells = [_cell(value, form) for value in values]
            shown.add_row(
                _load_name(load) if idx == 0 else "", label, *cells, _ratio(*values), end_section=idx == len(lines) - 1
            )
    return shown


def read_rows(path: Path) -> list[Row]:
    """The rows of a result file of this command."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no result of bench serve: {error}") from error
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{path} is no result of bench serve: it has no rows")
    if not all(isinstance(row, dict) and {"case", "batch", "tok_s", "ttft_p50_ms"} <= row.keys() for row in rows):
        raise ConfigError(f"{path} is no result of bench serve: its rows lack batch, tok_s or ttft_p50_ms")
    return rows


def point_name(row: Row) -> str:
    return _load_name(_load(row))


def _load(row: Row) -> tuple[str, Any]:
    if row.get("loop", "closed") == "closed":
        return "streams", row["batch"]
    return ("trace", row.get("trace")) if row.get("rate") is None else ("rate", row["rate"])


def _load_name(load: tuple[str, Any]) -> str:
    kind, value = load
    if kind == "streams":
        return f"{value} stream{'s' if value != 1 else ''}"
    return f"{value if value == 'inf' else format(value, 'g')} requests/s" if kind == "rate" else "trace"


def _compared() -> list[tuple[str, str, str]]:
    goodput = ("  within the limits", "goodput_request_s", "{:,.2f}")
    times = [
        (f"{_METRIC_NAMES[metric]}, {statistic}, ms", f"{metric}_{statistic}_ms", "{:,.2f}")
        for metric in METRICS
        for statistic in _STATISTICS
    ]
    return [goodput, ("failed requests", "failed", "{:,}"), *times]


def _cell(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


def _ratio(first: Any, second: Any) -> str:
    return f"{second / first:.2f} x" if first and second is not None else ""


def _goodput_cell(row: Row) -> str:
    share = row.get("goodput_share")
    return "" if share is None else f"{row['goodput_request_s']:,.2f} ({share:.0%})"


def _requests_cell(row: Row) -> str:
    unfinished = f", {row['unfinished']} unfinished" if row["unfinished"] else ""
    return f"{row['requests']:,}, {row['failed']:,}{unfinished}"
