"""Heads of the speculators library and MTP layers on the GPU under the guard: the tokens of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

heads = pytest.importorskip("tests.gpu.written_heads", reason="transformers writes the tiny models")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "1")


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise", "none"])
def test_a_head_of_speculators(tmp_path: Path, mode: str) -> None:
    target, folder = tmp_path / "target", tmp_path / "head"
    target.mkdir()
    folder.mkdir()
    heads.write_target(target)
    tiny = heads.tiny_heads
    tiny.eagle3(tiny.SPECULATORS, body=heads.LONG, layer="layers.0.").write(folder)
    given = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    heads.check(target, heads.tokens_of_the_cpu(target), lambda: given, cudagraph_mode=mode)


@pytest.mark.parametrize("style", ["deepseek", "qwen"])
@pytest.mark.parametrize(("mode", "k"), [("full", 1), ("full", 3), ("full_decode_only", 2)])
def test_mtp_layers(tmp_path: Path, style: str, mode: str, k: int) -> None:
    case = heads.tiny_heads.deepseek() if style == "deepseek" else heads.tiny_heads.qwen_mtp(2)
    target = heads.write_with_mtp(tmp_path, case)
    given = {"method": "mtp", "num_speculative_tokens": k}
    heads.check(target, heads.tokens_of_the_cpu(target), lambda: given, cudagraph_mode=mode)
