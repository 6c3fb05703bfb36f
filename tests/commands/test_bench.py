from __future__ import annotations

import datetime
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.commands.bench import _table, case_name
from slipstream.config import GIB
from slipstream.models.shapes import SHAPES
from slipstream.output import SYNTHETIC_NOTICE
from tests.commands.run_cli import RunCli, assert_one_line_error

SMALL = ("--prompt-len", 8, "--output-len", 12)


def test_result_file_and_json(cli: RunCli, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "results"
    arguments = ("--model", tiny_model, "--batch", "1,3", *SMALL, "--repeat", 2, "--output-dir", folder)
    outcome = cli("bench", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    (file,) = folder.iterdir()
    results = json.loads(file.read_text())
    assert json.loads(outcome.out) == results
    assert "tiny-llama" in file.name
    assert {"hardware", "torch", "commit", "date", "rows"} <= results.keys()
    assert datetime.datetime.fromisoformat(results["date"]).tzinfo is not None
    assert [row["batch"] for row in results["rows"]] == [1, 3]
    for row in results["rows"]:
        assert row["case"] == "tiny-llama"
        assert row["tok_s"] == max(row["tok_s_runs"]) > 0
        assert len(row["tok_s_runs"]) == 2
        assert (row["prompt_len"], row["output_len"], row["weights"]) == (8, 12, "model")


def test_table_of_a_shape(cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    tiny = {"architectures": ["LlamaForCausalLM"], **shape, **heads}
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    outcome = cli("bench", "--shape", "tiny", "--batch", "2", *SMALL, "--repeat", 1, "--output-dir", tmp_path)
    assert outcome.code == 0, outcome.err
    assert "tokens per second" in outcome.out
    assert "written to" in outcome.err
    (file,) = tmp_path.glob("*.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["case"], row["batch"], row["weights"]) == ("tiny", 2, "random")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--batch", "0"), ["--batch must be positive numbers"]),
        (("--batch", ""), ["--batch must be positive numbers"]),
        (("--prompt-len", 0), ["--prompt-len must be at least 1"]),
        (("--output-len", 1), ["--output-len must be at least"]),
        (("--repeat", 0), ["--repeat must be at least 1"]),
        (("--prompt-len", 501), ["make 513 tokens", "the context of tiny-llama is 512", "lower them"]),
        (("--max-model-len", 19), ["make 20 tokens", "max_model_len is 19"]),
        (("--max-num-seqs", 0), ["max_num_seqs must be a positive integer"]),
        (("--max-num-seqs", 2), ["--batch 4 is above max_num_seqs 2; raise --max-num-seqs"]),
        (("--num-gpu-blocks-override", 7), ["needs 8 KV cache pages, there are 7", "--num-gpu-blocks-override 8"]),
    ],
)
def test_bad_workload(
    cli: RunCli, tiny_model: Path, tmp_path: Path, arguments: tuple[object, ...], messages: list[str]
) -> None:
    folder = tmp_path / "results"
    base = ("bench", "--model", tiny_model, "--batch", 4, *SMALL, "--output-dir", folder)
    assert_one_line_error(cli(*base, *arguments), *messages)
    assert not folder.exists()


def test_unknown_shape(cli: RunCli, tmp_path: Path) -> None:
    outcome = cli("bench", "--shape", "llama3.1-8b", "--output-dir", tmp_path)
    assert_one_line_error(outcome, "unknown shape", "did you mean 'llama-3.1-8b'?")


def test_folder_that_cannot_be_written_is_refused_first(
    cli: RunCli, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("slipstream.engine.build.build_engine", lambda options: pytest.fail("built for nothing"))
    outcome = cli("bench", "--model", tiny_model, *SMALL, "--output-dir", tmp_path / "file")
    assert_one_line_error(outcome, "cannot write results", "choose another --output-dir")


def test_shape_beyond_memory_is_refused_before_allocation(
    cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.device.cpu.free_memory_bytes", lambda: 20 * GIB)
    outcome = cli("bench", "--shape", "llama-3.1-8b", "--batch", 1, "--output-dir", tmp_path)
    # 8,030,261,248 parameters, as published, of 4 bytes, and 25 pages of 16 tokens of 256 KiB.
    assert_one_line_error(outcome, "in float32 needs 30.0 GiB", "20.0 GiB are free", "use a smaller model")


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
        ("/models/Tiny-Llama/", "tiny-llama"),
        ("models/Tiny.Q4_1.gguf", "tiny.q4_1"),
    ],
)
def test_case_name(model: str, case: str) -> None:
    assert case_name(model) == case


def rendered(rows: list[dict[str, Any]]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(_table(rows, "a machine"))
    return console.export_text()


def test_table_of_a_speculator() -> None:
    plain = {"case": "tiny", "batch": 1, "tok_s": 10.0, "first_token_s": 0.1}
    drafted = {**plain, "k": 3, "drafts": 40, "accepted": 10, "accepted_len": 1.5}
    assert "drafts accepted" not in rendered([plain])
    text = rendered([drafted])
    for part in ("drafts accepted", "10 of 40", "mean length", "1.50"):
        assert part in text
    assert "SYNTHETIC" not in text
    assert f"SYNTHETIC: {SYNTHETIC_NOTICE}" in rendered([{**drafted, "synthetic": SYNTHETIC_NOTICE}])


def test_rows_of_a_speculator(cli: RunCli, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("bench", "--model", tiny_model, "--batch", "2", "--prompt-len", 8, "--output-len", 40, "--repeat", 1)
    outcome = cli(*arguments, "--output-dir", tmp_path, "--json", "--speculate", "ngram", "--k", 2)
    assert outcome.code == 0, outcome.err
    (row,) = json.loads(outcome.out)["rows"]
    assert (row["case"], row["k"], row["verify"]) == ("tiny-llama+ngram", 2, "match")
    assert 0 <= row["accepted"] <= row["drafts"]
    assert 1 <= row["accepted_len"] <= 3
    assert len(row["acceptance_by_position"]) <= 2
    assert "synthetic" not in row
    (file,) = tmp_path.iterdir()
    assert "tiny-llama+ngram" in file.name


def test_a_synthetic_benchmark_says_so_everywhere(cli: RunCli, tiny_model: Path, tmp_path: Path) -> None:
    rates = {"method": "ngram", "num_speculative_tokens": 1, "verify": "synthetic", "acceptance_rates": [1.0]}
    arguments = ("bench", "--model", tiny_model, "--batch", "1", "--prompt-len", 8, "--output-len", 40, "--repeat", 1)
    outcome = cli(*arguments, "--output-dir", tmp_path, "--json", "--speculative-config", json.dumps(rates))
    assert outcome.code == 0, outcome.err
    assert outcome.err.startswith(f"WARNING: synthetic acceptance: {SYNTHETIC_NOTICE}\n")
    (row,) = json.loads(outcome.out)["rows"]
    assert (row["verify"], row["synthetic"]) == ("synthetic", SYNTHETIC_NOTICE)
    assert row["accepted_len"] == pytest.approx(2.0, abs=0.1)
