"""Draft lengths that change from step to step, on the GPU under the guard: the CPU's tokens, whatever is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.attention.backend import Caps
from slipstream.config import EngineConfig, EngineOptions
from slipstream.engine import build
from slipstream.engine.build import build_shape
from slipstream.models.shapes import forced_eagle3
from slipstream.scheduler.draft_length import DraftLength

heads = pytest.importorskip("tests.gpu.written_heads", reason="transformers writes the tiny models")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "1")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = heads.write_target(tmp_path_factory.mktemp("target"))
    return folder


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = heads.tokens_of_the_cpu(target)
    return found


def speculation(method: str, target: Path, folder: Path) -> dict[str, Any]:
    common: dict[str, Any] = {"method": method, "num_speculative_tokens": 7, "adaptive": True}
    if method in ("eagle", "eagle3"):
        tiny = heads.tiny_heads
        case = tiny.eagle(heads.LONG) if method == "eagle" else tiny.eagle3(body=heads.LONG)
        return common | {"model": str(case.write(folder))}
    return common | ({"model": str(target)} if method == "draft_model" else {})


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise", "none"])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3"])
def test_any_lengths_give_the_same_tokens(
    target: Path,
    expected: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    mode: str,
) -> None:
    from tests.sim.world import RandomLength

    def drawn(config: EngineConfig, _caps: Caps) -> tuple[DraftLength, None]:
        assert config.speculative is not None
        return RandomLength(config.speculative.lengths, 3), None

    monkeypatch.setattr(build, "decide_draft_length", drawn)
    given = speculation(method, target, tmp_path)
    least = 10 if method == "ngram" else 100  # little is said twice
    heads.check(target, expected, lambda: given, least, cudagraph_mode=mode, steps_in_flight=2)


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_lengths_that_adapt_give_the_same_tokens(
    target: Path, expected: dict[str, list[int]], tmp_path: Path, method: str
) -> None:
    given = speculation(method, target, tmp_path)
    heads.check(target, expected, lambda: given, 0, steps_in_flight=2)


def test_costs_are_measured_and_graphs_stay_within_their_memory() -> None:
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=32,
        max_model_len=512,
        speculative_config={**forced_eagle3("smollm2-135m", 7), "adaptive": True},
    )
    engine = build_shape(options, "smollm2-135m")
    core = engine.core
    while core.use_idle_time():
        pass
    costs = core.scheduler.drafts.length.costs  # type: ignore[attr-defined]
    for size in (1, 2, 4, 8, 16, 32):
        seconds = [costs.seconds(size, k) for k in (0, 1, 2, 3, 5, 7)]
        assert all(0 < s < 0.1 for s in seconds)
        assert seconds[0] < seconds[-1]
    assert core.stats.num_missing_graphs == 0
    assert 0 < core.stats.graph_bytes < 2 * 2**30
    torch.cuda.synchronize()
