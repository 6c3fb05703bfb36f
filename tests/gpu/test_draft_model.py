"""Speculation on the GPU under the guard: drafts change no token and wait for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import GRAPH_MODES, EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.request import Request
from slipstream.speculate.rejection import DRAFT_NOISE, RESIDUAL_NOISE
from tests.engine.drive import make_request, run
from tests.speculate.coin_model import make_core, sigmas_off
from tests.speculate.unbiased import drawn_with, try_many

tiny_models = pytest.importorskip("tests.tiny_models", reason="transformers writes the tiny models")
pytestmark = pytest.mark.gpu
MakeEngine = Callable[..., Engine]

_KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 2, "min_tokens": 3},
]


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "1")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target, and a drafter that is often right: the target with noise in its weights."""
    model = tiny_models.build("llama")
    target = tiny_models.save(model, tmp_path_factory.mktemp("target"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return {"target": target, "near": tiny_models.save(model, tmp_path_factory.mktemp("near"))}


@pytest.fixture
def make_engine(folders: dict[str, Path]) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        small = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
        defaults = {"model": str(folders["target"]), **small, "cudagraph_capture_sizes": (1, 2, 4, 8, 16, 32, 64, 128)}
        made.append(build_engine(EngineOptions.from_dict({**defaults, **options})))
        return made[-1]

    yield make
    for engine in made:
        assert engine.core.stats.num_sync_violations == 0
        engine.core.scheduler.check_idle()


def some_requests(count: int = 18, **params: Any) -> list[Request]:
    rng = random.Random(5)
    requests = []
    for i in range(count):
        own = [rng.randrange(256) for _ in range(rng.choice([1, 5, 17, 40]))]
        kind = {**_KINDS[i % len(_KINDS)], **params}
        stops = tuple(rng.sample(range(256), 5)) if i % 4 == 0 else ()
        requests.append(make_request(f"r{i}", own * rng.choice([1, 3]), rng.choice([1, 9, 40]), stops, seed=i, **kind))
    return requests


def tokens_of(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    return {i: outcome.token_ids for i, outcome in run(engine.core, requests).items()}


@pytest.fixture(scope="session")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    options = {"model": str(folders["target"]), "device": "cpu", "dtype": "float64", "max_num_seqs": 16}
    return tokens_of(build_engine(EngineOptions.from_dict(options)), some_requests())


def speculation(method: str, k: int, folders: dict[str, Path], **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"method": method, "num_speculative_tokens": k, **more}
    return found | ({"model": str(folders["near"])} if method == "draft_model" else {})


@pytest.mark.parametrize("mode", GRAPH_MODES)
@pytest.mark.parametrize(("method", "k"), [("ngram", 4), ("draft_model", 1), ("draft_model", 3), ("draft_model", 5)])
def test_the_same_tokens_with_and_without_drafts(
    make_engine: MakeEngine, folders: dict[str, Path], expected: dict[str, list[int]], method: str, k: int, mode: str
) -> None:
    engine = make_engine(speculative_config=speculation(method, k, folders), cudagraph_mode=mode, steps_in_flight=2)
    assert tokens_of(engine, some_requests()) == expected
    assert engine.core.stats.num_accepted_tokens > 0
    while engine.core.use_idle_time():
        pass
    # Now every size has its graph, those of the drafter too.
    assert tokens_of(engine, some_requests()) == expected


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_greedy_requests_under_rejection(make_engine: MakeEngine, folders: dict[str, Path], method: str) -> None:
    plain = tokens_of(make_engine(), some_requests(temperature=0.0))
    engine = make_engine(speculative_config=speculation(method, 3, folders, verify="rejection"))
    assert tokens_of(engine, some_requests(temperature=0.0)) == plain


@pytest.mark.parametrize("verify", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_the_target_is_right(
    make_engine: MakeEngine, folders: dict[str, Path], verify: str, temperature: float
) -> None:
    """Up to rounding: the target sums over k + 1 tokens at once, the drafter over two or one."""
    same = {"method": "draft_model", "model": str(folders["target"]), "num_speculative_tokens": 4, "verify": verify}
    engine = make_engine(speculative_config=same)
    run(engine.core, [make_request(f"r{i}", [i, 7, 9], 60, seed=i, temperature=temperature) for i in range(16)])
    stats = engine.core.stats
    assert stats.num_draft_tokens > 500
    assert stats.num_accepted_tokens >= 0.99 * stats.num_draft_tokens


def test_forced_acceptance(make_engine: MakeEngine, folders: dict[str, Path]) -> None:
    rates = [0.73, 0.521, 0.355]
    engine = make_engine(
        speculative_config=speculation("draft_model", 3, folders, verify="synthetic", acceptance_rates=rates)
    )
    run(engine.core, [make_request(f"r{i}", [i, 7, 9], 200, seed=i) for i in range(16)])
    stats = engine.core.stats
    assert stats.num_accepted_tokens / stats.num_draft_steps == pytest.approx(sum(rates), abs=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rejection_is_unbiased(dtype: torch.dtype) -> None:
    outcome = try_many("cuda", 1_000_000, dtype, drawn_with(DRAFT_NOISE), batch_size=8192)
    assert abs(outcome.sigmas) < 6, outcome
    shared = try_many("cuda", 60_000, dtype, drawn_with(RESIDUAL_NOISE), batch_size=8192)
    assert shared.sigmas > 12, shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_whole_engine_is_unbiased(dtype: torch.dtype) -> None:
    """A million tokens through the real drafter, in graphs and outside of them."""
    assert abs(sigmas_off(make_core("cuda", dtype, 256), dtype, 1_000_000, 256)) < 6
    assert sigmas_off(make_core("cuda", dtype, 256, purpose=RESIDUAL_NOISE), dtype, 100_000, 256) > 12
