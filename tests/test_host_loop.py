"""The benchmark of the host's loop runs over the engine as it is, and every case does what its name says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import host_loop
from host_loop import CASES, NUM_ACCEPTED, NUM_DRAFTS, Bench


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--batch", "1,5", "--steps", "80", "--repeat", "1", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["host_loop.py", *arguments])
    num_threads = torch.get_num_threads()
    try:
        assert host_loop.main() == 0
    finally:
        torch.set_num_threads(num_threads)
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["batch"]) for row in rows] == [(case, batch) for case in CASES for batch in (1, 5)]
    for row in rows:
        assert all(row["parts_us"][name] > 0 for name in ("schedule", "stage", "graphs", "send", "read", "collect"))
        assert 0 < row["host_us"] < 1e5


@pytest.mark.parametrize(
    ("case", "drafts", "tokens"), [(CASES[0], 0, 1), (CASES[1], NUM_DRAFTS, 1 + NUM_ACCEPTED), (CASES[2], 0, 1)]
)
def test_drafts_of_each_case(case: str, drafts: int, tokens: int) -> None:
    with torch.inference_mode():
        bench = Bench("cpu", 4, 80, case)
        requests = bench.begin(3)
        for _ in range(20):
            updates = bench.core.step()
            assert [len(ids) for ids in updates.token_ids] == [tokens] * 3
            assert list(updates.num_drafts or (0, 0, 0)) == [drafts] * 3
            assert bench.core.scheduler.stats.draft_length == drafts
        bench.end(requests)
