"""Models with gated delta nets on the GPU under the guard: decodes and checks of drafts in graphs, tokens of the CPU.

In float32 a token that differs from the CPU's float64 would have to be a tie. Where all graphs are recorded every step
is a replay, and the delta nets' metadata is not built on the host: that was captured as well.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.attention.gdn import GDNAttentionMetadata, GDNBackend
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine, build_shape
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.manager import CudaGraphManager
from slipstream.models import shapes
from slipstream.request import Request
from tests.engine.drive import Outcome, make_request, run

pytestmark = pytest.mark.gpu
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # the last holds any step
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
SMALL: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "cudagraph_capture_sizes": SIZES}
# The layers' own widths; few heads, experts and tokens.
REAL_WIDTHS: dict[str, Any] = {
    **shapes.SHAPES["qwen3-next-16l-64e"],
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "1")


class Steps:
    """Of one engine, since the last ``clear``: which graphs were replayed, and how often metadata were built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replayed: Counter[tuple[int | None, int]] = Counter()  # tokens of each request, drafts proposed after
        self.num_built = 0
        self.engine: Engine | None = None
        replay, build = CudaGraphManager.replay, GDNBackend.build

        def noted_replay(manager: CudaGraphManager, desc: BatchExecutionDescriptor) -> None:
            if self.engine is not None and manager is self.engine.core.runner.graphs.manager:  # not a drafter's own
                self.replayed[desc.query_len, desc.num_drafts] += 1
            replay(manager, desc)

        def noted_build(backend: GDNBackend, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
            self.num_built += 1
            return build(backend, common)

        monkeypatch.setattr(CudaGraphManager, "replay", noted_replay)
        monkeypatch.setattr(GDNBackend, "build", noted_build)

    def clear(self, engine: Engine) -> None:
        self.engine, self.num_built = engine, 0
        self.replayed.clear()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def record_all(engine: Engine) -> None:
    while engine.core.use_idle_time():
        pass
    assert engine.core.runner.idle_work.num_left == 0


def check_replays(engine: Engine, steps: Steps, requests: list[Request], k: int) -> dict[str, Outcome]:
    """Every step of these requests is a replay; decodes with all their drafts, and with drafting inside, among them."""
    before = engine.core.stats.num_steps
    steps.clear(engine)
    outcomes = run(engine.core, requests)
    assert steps.replayed.total() == engine.core.stats.num_steps - before
    assert steps.num_built == 0
    assert steps.replayed[1 + k, k] > 10, steps.replayed
    check_quiet(engine)
    return outcomes


def check_quiet(engine: Engine) -> None:
    assert engine.core.stats.num_sync_violations == 0
    engine.core.scheduler.check_idle()


# --- a checkpoint with an MTP layer: the tokens of the CPU ----------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny_mtp = pytest.importorskip("tests.models.heads.tiny_mtp", reason="transformers writes the tiny models")
    changes = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    written: Path = tiny_mtp.write_hybrid(tmp_path_factory.mktemp("hybrid"), **changes)
    return written


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    options = {"model": str(folder), "device": "cpu", "dtype": "float64", "max_num_seqs": 16}
    return tokens_of(run(build_engine(EngineOptions.from_dict(options)).core, some_requests()))


def some_requests() -> list[Request]:
    """Greedy ones and drawn ones, prompts with something to find again in them."""
    rng = random.Random(5)
    requests = []
    for i in range(18):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 5, 17, 40]))] * rng.choice([1, 3])
        drawn = {"temperature": 0.8} if i % 3 == 1 else {}
        requests.append(make_request(f"r{i}", prompt, rng.choice([1, 9, 40]), seed=i, **drawn))
    return requests


def tokens_of(outcomes: dict[str, Outcome]) -> dict[str, list[int]]:
    return {name: outcome.token_ids for name, outcome in outcomes.items()}


def with_drafts(method: str | None, k: int) -> dict[str, Any] | None:
    return None if method is None else {"method": method, "num_speculative_tokens": k}


@pytest.mark.parametrize(("method", "k"), [(None, 0), ("ngram", 3), ("mtp", 1), ("mtp", 3)])
def test_tokens_of_the_cpu_in_graphs(
    folder: Path, expected: dict[str, list[int]], steps: Steps, method: str | None, k: int
) -> None:
    given = {"model": str(folder), **ON_GPU, **SMALL, "speculative_config": with_drafts(method, k)}
    engine = build_engine(EngineOptions.from_dict({**given, "cudagraph_mode": "full"}))
    assert tokens_of(run(engine.core, some_requests())) == expected
    record_all(engine)
    assert tokens_of(check_replays(engine, steps, some_requests(), k)) == expected
    check_acceptance(engine, k)


@pytest.mark.parametrize("mode", ["none", "piecewise", "full_decode_only"])
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_tokens_of_the_cpu_in_any_mode(
    folder: Path, expected: dict[str, list[int]], steps: Steps, method: str, mode: str
) -> None:
    """With chunks of prompts among drafts and too few pages for everybody."""
    crowded = {"steps_in_flight": 2, "long_prefill_token_threshold": 24, "block_size": 8, "num_gpu_blocks_override": 60}
    given = {"model": str(folder), **ON_GPU, **SMALL, **crowded, "speculative_config": with_drafts(method, 2)}
    engine = build_engine(EngineOptions.from_dict({**given, "cudagraph_mode": mode}))
    steps.clear(engine)
    assert tokens_of(run(engine.core, some_requests())) == expected
    # Pieces hold the delta nets' layers. In the other modes steps with prompts in them are launched.
    assert (steps.num_built > 0) is (mode != "piecewise")
    assert (steps.replayed[3, 2] > 10) is (mode == "full_decode_only"), steps.replayed
    check_acceptance(engine, 2)
    check_quiet(engine)


def check_acceptance(engine: Engine, k: int) -> None:
    stats = engine.core.stats
    assert (stats.num_draft_tokens > 30) is (k > 0)
    if k:
        share = stats.num_accepted_tokens / stats.num_draft_tokens
        assert 0.05 < share < 0.95, "accepted drafts, and rejected ones"


# --- random weights, the layers' own widths -------------------------------------------------------------


def build_real(monkeypatch: pytest.MonkeyPatch, method: str | None, **options: Any) -> Engine:
    monkeypatch.setitem(shapes.SHAPES, "real-widths", REAL_WIDTHS)
    given = {**ON_GPU, **SMALL, "max_model_len": 512, "speculative_config": with_drafts(method, 3), **options}
    return build_shape(EngineOptions.from_dict(given), "real-widths")


def repeating_requests() -> list[Request]:
    rng = random.Random(1)
    words = [rng.randrange(512) for _ in range(24)]
    return [make_request(f"r{i}", (words * 6)[: rng.choice([5, 40, 130])], 40, seed=i) for i in range(12)]


def test_the_same_tokens_with_drafts_at_real_widths(monkeypatch: pytest.MonkeyPatch, steps: Steps) -> None:
    plain = tokens_of(run(build_real(monkeypatch, None).core, repeating_requests()))
    engine = build_real(monkeypatch, "ngram", cudagraph_mode="full")
    record_all(engine)
    assert tokens_of(check_replays(engine, steps, repeating_requests(), 3)) == plain
    assert engine.core.stats.num_draft_tokens > 30


def test_sixteen_bits_at_real_widths(monkeypatch: pytest.MonkeyPatch, steps: Steps) -> None:
    """Near ties in bfloat16 may break either way; that all requests finish, in graphs, is certain."""
    engine = build_real(monkeypatch, "ngram", cudagraph_mode="full", dtype="bfloat16")
    record_all(engine)
    outcomes = check_replays(engine, steps, repeating_requests(), 3)
    assert all(outcome.error is None and len(outcome.token_ids) == 40 for outcome in outcomes.values())
