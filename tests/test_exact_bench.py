"""``benchmarks/exact.py`` from end to end on a CPU, with a tiny model; and that it reports what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import exact
from exact_kernels import MODELS, check_rows
from result_files import read_result
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.kernels import native
from tests import tiny_models
from tests.test_spec_bench import QUESTIONS, put

ARGUMENTS = ["--kernel-shapes", "tiny", "--largest", "70", "--draws", "6", "--shapes", "none", "--cost-batch", "1,2"]
ARGUMENTS += ["--batch", "1,3", "--output-len", "24", "--prompt-len", "6", "--device", "cpu", "--max-model-len", "128"]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    folder = tiny_models.save(tiny_models.build("llama", head_dim=32), tmp_path / "tiny")
    questions = put(tmp_path / "question.jsonl", QUESTIONS)
    monkeypatch.setattr("exact_cost.TURNS", 2)
    files = ["--questions", str(questions), "--model", str(folder), "--output-dir", str(tmp_path / "results")]
    return [*ARGUMENTS, *files]


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    (path,) = (tmp_path / "results").glob("*.json")
    assert json.loads(path.read_text())
    return read_result(path).rows


@pytest.mark.skipif(native.library() is None, reason="there is no C compiler here")
def test_all_parts(tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []

    def build(options: EngineOptions) -> Engine:
        built.append(options.exact)
        return build_engine(options)

    for module in ("exact_texts", "exact_cost", "spec_bench"):
        monkeypatch.setattr(f"{module}.build_engine", build)
    assert exact.main(given) == 0
    rows = rows_of(tmp_path)
    by_case = {case: [row for row in rows if row["case"] == case] for case in {row["case"] for row in rows}}
    assert by_case.keys() == {"exact-kernels", "exact-spec-bench", "exact-settings", "exact-cost"}
    assert all(row["equal"] == row["compared"] > 5 for row in by_case["exact-kernels"])
    texts = by_case["exact-spec-bench"]
    # Three first turns and a second one, two temperatures, two batches: plain, with n-grams, and the sum of the latter.
    assert [row["texts"] for row in texts] == [4] * 8 + [16] and all(
        row["texts"] == row["texts_equal"] for row in texts
    )
    settings = by_case["exact-settings"]
    assert len(settings) == 16 and not any(row["differences"] for row in settings)
    assert any(row["num_preemptions"] for row in settings) and any(row["num_cached_tokens"] for row in settings)
    assert {row["phase"] for row in by_case["exact-cost"]} == {"decode", "prompt"}
    assert all(row["ratio"] > 0 for row in by_case["exact-cost"])
    assert built.count(False) == 1, "the default engine of the cost, and no other"


def test_differences_are_faults() -> None:
    row = {"case": "exact-settings", "batch": 1, "texts": 3, "differences": 1}
    planted = {
        "case": "exact-kernels",
        "kernel": "planted cut",
        "batch": 1,
        "compared": 9,
        "equal": 9,
        "is_found": False,
    }
    fine = [
        {"case": "exact-spec-bench", "batch": 1, "texts": 4, "texts_equal": 4},
        {"case": "exact-cost", "batch": 1, "ratio": 0.5},
        planted | {"equal": 3, "is_found": True},
        {"case": "exact-kernels", "kernel": "o", "batch": 1, "compared": 9, "equal": 9},
    ]
    unequal = {"case": "exact-spec-bench", "batch": 1, "texts": 4, "texts_equal": 3}
    assert exact.faults([row, planted, *fine, unequal]) == [row, planted, unequal]


def test_rows_that_depend_on_their_number_are_counted() -> None:
    x = torch.randn(70, 8)
    found = check_rows("sum", lambda rows: (x[rows] + (len(x[rows]) > 8),), 70)
    assert found == {"kernel": "sum", "compared": 64, "equal": 56}


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--parts", "text"], "unknown part"), (["--parts", "texts"], "need --questions"), (["--shapes", "x"], "unknown")],
)
def test_wrong_options(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        exact.parse(given)
    assert message in capsys.readouterr().err
    assert "tiny" in MODELS
