"""The benchmark of speculative steps, on a CPU with a tiny shape: it runs, and says what was forced."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import speculative_throughput
from slipstream.errors import ConfigError
from slipstream.models import shapes
from slipstream.models.shapes import forced_rates, step_bytes, weight_bytes

TINY = {
    **shapes.SHAPES["qwen3-8b"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TINY_HEAD = {
    **TINY,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "dflash_config": {"block_size": 16, "mask_token_id": 299, "target_layer_ids": [1, 3]},
}


@pytest.mark.parametrize("length", [1.0, 2.61, 6.92, 9.56, 16.0])
def test_forced_rates_bring_what_was_asked_for(length: float) -> None:
    rates = forced_rates(length, 15)
    assert 1 + sum(rates) == pytest.approx(length)
    assert all(rate == pytest.approx(rates[0] ** (i + 1)) for i, rate in enumerate(rates))
    with pytest.raises(ConfigError, match="from 1 to 16 tokens, not 17"):
        forced_rates(17, 15)


def test_a_block_reads_its_head_once() -> None:
    """By hand: 36 layers of 192.9 M weights and an output matrix of 622 M; five layers, a mix and that matrix again."""
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    matrix = 151936 * 4096
    assert weight_bytes("qwen3-8b") == 2 * (36 * layer + matrix)
    head = 2 * (5 * layer + 5 * 4096 * 4096 + matrix)
    for k in (1, 15):
        assert step_bytes("qwen3-8b", k, "dflash") == weight_bytes("qwen3-8b") + head


def test_it_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    monkeypatch.setitem(shapes.HEAD_SHAPES, "tiny-dflash", TINY_HEAD)
    given = ["--shape", "tiny", "--method", "dflash", "--device", "cpu", "--dtype", "float32", "--batch", "2"]
    given += ["--k", "0,15", "--accepted-len", "6.92", "--output-len", "160", "--repeat", "1", "--output-dir"]
    monkeypatch.setattr(sys, "argv", ["speculative_throughput.py", *given, str(tmp_path)])
    assert speculative_throughput.main() == 0
    (path,) = tmp_path.glob("*.json")
    plain, forced = json.loads(path.read_text())["rows"]
    assert (plain["case"], plain["forced"], plain["accepted_len"]) == ("tiny", False, None)
    assert (forced["case"], forced["batch"], forced["k"]) == ("tiny+dflash", 2, "15")
    assert (forced["accepted_len"], forced["forced"]) == (6.92, True)
    assert 4.5 < forced["mean_length"] < 9.5, "what was forced, as far as 320 tokens can tell"
