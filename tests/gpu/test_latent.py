"""Models with latent attention on the GPU under the guard: decodes and checks of drafts in graphs, tokens of the CPU.

In float32 a token that differs from the CPU's float64 would have to be a tie. Steps in which every request decodes are
replays of one graph, the table of parts included; prompts are launched between pieces.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.attention.mla import LatentMetadata
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine, build_shape
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.manager import CudaGraphManager
from slipstream.models import shapes
from tests.engine.drive import run
from tests.gpu.test_hybrid import (
    ON_GPU,
    SMALL,
    check_acceptance,
    check_quiet,
    record_all,
    repeating_requests,
    some_requests,
    tokens_of,
    with_drafts,
)

pytestmark = pytest.mark.gpu
# The layers' own widths; few layers, heads, experts and tokens.
REAL_WIDTHS: dict[str, Any] = {
    **shapes.SHAPES["deepseek-v2-lite"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "1")


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int | None, int]]:
    """Replays of whole steps: tokens of each request, drafts proposed after."""
    found: Counter[tuple[int | None, int]] = Counter()
    replay = CudaGraphManager.replay

    def noted(manager: CudaGraphManager, desc: BatchExecutionDescriptor) -> None:
        found[desc.query_len, desc.num_drafts] += 1
        replay(manager, desc)

    monkeypatch.setattr(CudaGraphManager, "replay", noted)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = pytest.importorskip("tests.models.heads.tiny_deepseek", reason="transformers writes the tiny models")
    written: Path = tiny.write_guessing(tmp_path_factory.mktemp("deepseek"), num_layers=2)
    return written


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    options = {"model": str(folder), "device": "cpu", "dtype": "float64", "max_num_seqs": 16}
    return tokens_of(run(build_engine(EngineOptions.from_dict(options)).core, some_requests()))


def engine_of(folder: Path, method: str | None, k: int, **options: Any) -> Engine:
    given = {"model": str(folder), **ON_GPU, **SMALL, "speculative_config": with_drafts(method, k), **options}
    return build_engine(EngineOptions.from_dict(given))


@pytest.mark.parametrize(("method", "k"), [(None, 0), ("ngram", 3), ("mtp", 1), ("mtp", 3)])
def test_tokens_of_the_cpu_in_graphs(
    folder: Path, expected: dict[str, list[int]], replayed: Counter[Any], method: str | None, k: int
) -> None:
    engine = engine_of(folder, method, k)
    assert tokens_of(run(engine.core, some_requests())) == expected
    record_all(engine)
    replayed.clear()
    assert tokens_of(run(engine.core, some_requests())) == expected
    assert replayed[1 + k, k] > 10, replayed
    check_acceptance(engine, k)
    check_quiet(engine)


@pytest.mark.parametrize("mode", ["none", "piecewise", "full_decode_only"])
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_tokens_of_the_cpu_in_any_mode(
    folder: Path, expected: dict[str, list[int]], replayed: Counter[Any], method: str, mode: str
) -> None:
    """With chunks of prompts among drafts and too few pages for all requests."""
    crowded = {"steps_in_flight": 2, "long_prefill_token_threshold": 24, "block_size": 8, "num_gpu_blocks_override": 60}
    engine = engine_of(folder, method, 2, cudagraph_mode=mode, **crowded)
    assert tokens_of(run(engine.core, some_requests())) == expected
    assert (replayed[3, 2] > 10) is (mode == "full_decode_only"), replayed
    check_acceptance(engine, 2)
    check_quiet(engine)


def build_real(monkeypatch: pytest.MonkeyPatch, method: str | None, **options: Any) -> Engine:
    monkeypatch.setitem(shapes.SHAPES, "real-widths", REAL_WIDTHS)
    given = {**ON_GPU, **SMALL, "max_model_len": 512, "speculative_config": with_drafts(method, 3), **options}
    return build_shape(EngineOptions.from_dict(given), "real-widths")


def test_the_same_tokens_with_drafts_at_real_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokens_of(run(build_real(monkeypatch, None).core, repeating_requests()))
    engine = build_real(monkeypatch, "ngram")
    record_all(engine)
    assert tokens_of(run(engine.core, repeating_requests())) == plain
    assert engine.core.stats.num_draft_tokens > 30
    check_quiet(engine)


def test_sixteen_bits_at_real_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near ties in bfloat16 may break either way; that all requests finish, in graphs, is certain."""
    engine = build_real(monkeypatch, "ngram", dtype="bfloat16")
    record_all(engine)
    outcomes = run(engine.core, repeating_requests())
    assert all(outcome.error is None and len(outcome.token_ids) == 40 for outcome in outcomes.values())
    check_quiet(engine)


def test_a_replay_builds_nothing_on_the_host(
    folder: Path, replayed: Counter[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder, None, 0)
    record_all(engine)
    requests = some_requests()[:1]
    run(engine.core, requests)
    num_built, build = 0, LatentMetadata.build.__func__  # type: ignore[attr-defined]

    def noted(cls: type[LatentMetadata], *given: Any) -> LatentMetadata:
        nonlocal num_built
        num_built += 1
        return build(cls, *given)  # type: ignore[no-any-return]

    monkeypatch.setattr(LatentMetadata, "build", classmethod(noted))
    before = engine.core.stats.num_steps
    replayed.clear()
    run(engine.core, requests)
    assert num_built == engine.core.stats.num_steps - before - replayed.total()
