from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.engine.build import Engine
from slipstream.engine.trace import NoTrace, Trace
from tests.engine.drive import make_request, run


def test_off_unless_asked_for(make_engine: Callable[..., Engine]) -> None:
    assert isinstance(make_engine().core.trace, NoTrace)


def test_every_step_has_its_ranges(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    monkeypatch.setenv("SLIPSTREAM_TRACE", str(path))
    core = make_engine().core
    run(core, [make_request("r", range(20), 6)])
    assert isinstance(core.trace, Trace)
    core.trace.write()
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    by_name = {name: [e for e in events if e["name"] == name] for name in ("schedule", "launch", "wait", "collect")}
    assert [len(by_name[name]) for name in ("launch", "wait", "collect")] == [6, 6, 6]
    for before, after in zip(by_name["launch"], by_name["wait"], strict=True):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
