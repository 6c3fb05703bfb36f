"""The benchmark of what a front end costs: it runs, and its figures are those of whole answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import server_limit


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--streams", "4", "--seconds", "2", "--front-ends", "2", "--tokens-per-s", "2000"]
    monkeypatch.setattr("sys.argv", ["server_limit.py", *arguments, "--output-dir", str(tmp_path)])
    assert server_limit.main() == 0
    (path,) = tmp_path.glob("*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["case"], row["batch"], row["front_ends"]) == ("server-limit", 4, 2)
    assert row["us_per_token"] > 0 and row["us_per_request"] > 0
    assert 0.5 < row["events_per_token"] < 1.1
