from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from slipstream.errors import ConfigError
from slipstream.load.figures import measure
from slipstream.load.report import compare, point_name, read_rows, table, warnings
from tests.load.runs import Run

CLOSED: dict[str, Any] = {"case": "m+serve", "loop": "closed"}


def row(batch: int = 8, *, speed: float = 1.0, limits: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    """Two answers of three tokens: first after 200 ms, then gaps of 50 ms, all of it faster by ``speed``."""
    run = Run()
    for start in (0.0, 1.0):
        times = [start / speed + second / speed for second in (0.2, 0.25, 0.3)]
        run.ok(start / speed, times, times[-1], tokens=3, prompt_tokens=12)
    return {**CLOSED, "batch": batch, **measure(run.records(), limits or {}), **more}


def lines_of(shown: Table) -> dict[str, list[str]]:
    """The cells of each line, by the first one."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown)
    lines = [line.split("│")[1:-1] for line in console.export_text().splitlines() if "│" in line]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def text_of(shown: Table) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def test_table_has_a_column_for_each_row() -> None:
    rows = [row(1), row(32, speed=2.0)]
    shown = lines_of(table(rows, "title"))
    # Six tokens from 0 to 1.3 s.
    assert shown["output tokens per second"] == ["4.6", "9.2"]
    assert shown["requests per second"] == ["1.54", "3.08"]
    assert shown["requests, and failed"] == ["2, 0", "2, 0"]
    assert shown["time to first token, ms: mean"] == ["200.0", "100.0"]
    assert shown["time between tokens, ms: mean"] == ["50.0", "25.0"]
    assert shown["end to end, ms: mean"] == ["300.0", "150.0"]
    assert shown["prompt tokens, mean"] == ["12", "12"]
    assert shown["output tokens, counted by"] == ["6, usage", "6, usage"]
    assert shown["client, share of a core"] == ["50%", "50%"]
    assert "within the limits" not in shown
    text = text_of(table(rows, "title"))
    assert "1 stream " in text
    assert "32 streams" in text


def test_table_with_limits_failures_and_nothing_to_show() -> None:
    run = Run()
    run.failed(0.0, 1.0, "HTTP 500: no")
    run.unfinished(0.0, 1.0)
    empty = {**CLOSED, "batch": 2, **measure(run.records(), {"ttft": 150.0})}
    shown = lines_of(table([row(limits={"ttft": 150.0}), row(speed=2.0, limits={"ttft": 150.0}), empty], ""))
    assert shown["within the limits"] == ["0.00 (0%)", "3.08 (100%)", "0.00 (0%)"]
    assert shown["requests, and failed"][2] == "0, 1, 1 unfinished"
    assert shown["time to first token, ms: mean"][2] == ""


def test_names_of_loads() -> None:
    assert point_name({"batch": 1, "loop": "closed"}) == "1 stream"
    assert point_name({"batch": 8, "loop": "open", "rate": 4.0}) == "4 requests/s"
    assert point_name({"batch": 8, "loop": "open", "rate": "inf"}) == "inf requests/s"
    assert point_name({"batch": 8, "loop": "open", "trace": "t.jsonl"}) == "trace"


def test_warnings() -> None:
    assert warnings([row()]) == []
    run = Run()
    run.ok(0.0, [1.0], 2.0)
    for _ in range(3):
        run.failed(0.0, 1.0, "HTTP 429: slow down")
    run.failed(0.0, 1.0, "connection reset")
    records = run.records(cpu={"cpu_s": 0.86, "wall_s": 1.0, "num_events": 1})
    records.due -= 0.1
    failed, busy, late = warnings([{**CLOSED, "batch": 4, **measure(records, {})}])
    assert failed == "4 streams: 4 of 5 requests failed: 3 x HTTP 429: slow down; 1 x connection reset"
    assert busy.startswith("4 streams: a client process was busy for 86% of the time, so the client may be the limit")
    assert late.startswith("4 streams: requests were sent up to 100 ms late (p99)")


def test_comparison() -> None:
    """One load in both, one in either."""
    text = text_of(compare([row(8), row(1)], [row(8, speed=2.0), row(32)], ("old", "new")))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    both = {line[1]: line[2:] for line in lines[: [line[0] for line in lines].index("1 stream")]}
    assert both["output tokens per second"] == ["4.6", "9.2", "2.00 x"]
    assert both["time to first token, p50, ms"] == ["200.00", "100.00", "0.50 x"]
    assert both["failed requests"] == ["0", "0", ""]
    only = {line[0]: line[1:] for line in lines if line[0]}
    assert list(only) == ["8 streams", "1 stream", "32 streams"]
    assert only["1 stream"] == ["output tokens per second", "4.6", "", ""]
    assert only["32 streams"] == ["output tokens per second", "", "4.6", ""]


def test_open_loops_are_compared_by_their_rate() -> None:
    """How many were under way at once differs from run to run."""
    first = row(7, loop="open", rate=4.0)
    second = row(9, loop="open", rate=4.0)
    text = text_of(compare([first], [second], ("a", "b")))
    assert text.count("4 requests/s") == 1
    assert "1.00 x" in text


def test_rows_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"rows": [row()]}))
    assert read_rows(path) == [row()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{oops", "is no result of bench serve"),
        ("[]", "it has no rows"),
        ('{"rows": []}', "it has no rows"),
        ('{"rows": [{"case": "x", "batch": 1, "tok_s": 4}]}', "its rows lack batch, tok_s or ttft_p50_ms"),
    ],
)
def test_files_that_are_no_result(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rows(path)
