"""The benchmarks of prompts and of mixed load, on a CPU with a tiny shape: they run, and write what they should."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import load_runs
import mixed_load
import prompts
from slipstream.models import shapes

TINY = {
    **shapes.SHAPES["llama-3.1-8b"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_scaling": None,
}
TINY_HEAD = {
    **TINY,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 100,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    monkeypatch.setitem(shapes.HEAD_SHAPES, "tiny-eagle3", TINY_HEAD)


def run(module: Any, given: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    arguments = [*given.split(), "--shape", "tiny", "--device", "cpu", "--output-dir", str(folder)]
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    assert module.main() == 0
    (path,) = folder.glob("*.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_the_burst_is_the_one_of_the_figures_it_is_compared_with() -> None:
    asked = load_runs.burst(256, (100, 2000), (50, 400))
    assert sum(one.prompt_len for one in asked) == 269_006
    assert sum(one.output_len for one in asked) == 57_033


def test_poisson_arrivals_have_their_rate() -> None:
    arrivals = load_runs.poisson(load_runs.burst(2000, (1, 2), (1, 2)), 25.0)
    assert 2000 / arrivals[-1].at == pytest.approx(25.0, rel=0.1)


def test_prompts_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(prompts, "--cases 1x40,3x16 --repeat 1 --prefer balance,throughput", tmp_path, monkeypatch)
    assert [(row["case"], row["batch"], row["prompt_len"]) for row in rows[:2]] == [
        ("tiny+prompts", 1, 40),
        ("tiny+prompts", 3, 16),
    ]
    assert len(rows) == 4 and all(row["tok_s"] > 0 for row in rows)


def test_mixed_load_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = "--rows 4 --settings default,constant,default+eagle3 --requests 6 --prompt-lens 5,30 --output-lens 4,12 "
    given += "--idle-len 30 --long-len 60 --num-long 2 --num-short 3 --short-lens 2,6 --repeat 1 --capacity 400"
    rows = run(mixed_load, given, tmp_path, monkeypatch)
    assert {row["case"] for row in rows} == {"tiny+mixed"} and {row["batch"] for row in rows} == {4}
    loads = {row["load"] for row in rows}
    assert loads == {"burst", "poisson", "idle", "among-long", "among-long, short prompts"}
    assert len(rows) == 3 * len(loads)
    for row in rows:
        assert row["seconds"] > 0 and row["itl_p99_ms"] >= row["itl_p50_ms"] and row["first_token_p99_ms"] > 0
        assert ("draft_lengths" in row) == row["setting"].endswith("eagle3")
    lengths = [row["draft_lengths"] for row in rows if "draft_lengths" in row]
    assert all(own == sorted(own) and 0 <= own[-1][1] <= 7 for own in lengths)
    assert any(k for own in lengths for _, k in own)
