"""Whole generations on the GPU under the guard: no step may wait, and the tokens are those of the CPU.

Small models in float32, whose sums differ from the CPU's float64 in the seventh digit: a token that differs would have
to be a tie. ``--model FOLDER`` runs the same over a model of one's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import GRAPH_MODES, EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.plan import StepPlan
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from tests.engine.drive import make_request, run

try:
    from tests import tiny_models
except ImportError:  # transformers writes them
    tiny_models = None  # type: ignore[assignment]

pytestmark = pytest.mark.gpu
MakeEngine = Callable[..., Engine]

# Each sampling parameter for itself, then all at once.
_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_n_sigma": {"temperature": 1.5, "top_n_sigma": 1.0},
    "top_k": {"temperature": 0.9, "top_k": 7},
    "top_p": {"temperature": 1.1, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "bias": {"logit_bias": {5: 3.0, 9: -50.0}},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(0, 256, 17))},
    "bad_words": {"bad_word_ids": ((5,), (7, 9), (101,))},
    "logprobs": {"logprobs": 5},
}
_SAMPLING["everything"] = {
    "temperature": 0.9,
    "top_n_sigma": 3.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "logit_bias": {5: 2.0},
    "min_tokens": 6,
    "bad_word_ids": ((7,),),
    "logprobs": 3,
    "stop_token_ids": tuple(range(3, 256, 40)),
}


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "1")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    if given := request.config.getoption("--model"):
        return Path(given)
    if tiny_models is None:
        pytest.skip("needs transformers for a tiny model, or --model FOLDER")
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def make_engine(folder: Path) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        small = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
        defaults = {"model": str(folder), **small, "cudagraph_capture_sizes": (1, 2, 4, 8, 12, 16, 32, 64, 128)}
        made.append(build_engine(EngineOptions.from_dict({**defaults, **options})))
        return made[-1]

    yield make
    for engine in made:
        assert engine.core.stats.num_sync_violations == 0
        engine.core.scheduler.check_idle()


def some_requests(count: int = 16) -> list[Request]:
    rng = random.Random(5)
    kinds = list(_SAMPLING.values())
    requests = []
    for i in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 5, 17, 40, 90]))]
        requests.append(make_request(f"r{i}", prompt, rng.choice([1, 7, 24]), seed=i, **kinds[i % len(kinds)]))
    return requests


def tokens_of(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    return {i: outcome.token_ids for i, outcome in run(engine.core, requests).items()}


@pytest.fixture(scope="session")
def expected(folder: Path) -> dict[str, list[int]]:
    options = {"model": str(folder), "device": "cpu", "dtype": "float64", "max_num_seqs": 16}
    return tokens_of(build_engine(EngineOptions.from_dict(options)), some_requests())


@pytest.mark.parametrize("speculate", [None, "ngram"])
@pytest.mark.parametrize("mode", ["none", "full", "full_and_piecewise"])
def test_a_common_beginning_that_is_read_once(make_engine: MakeEngine, mode: str, speculate: str | None) -> None:
    rng = random.Random(9)
    stem = [rng.randrange(256) for _ in range(80)]
    alone = [make_request("first", [*stem, 1], 3)]
    others = [make_request(f"r{i}", [*stem, *range(i, 2 * i)], 24, seed=i, **_SAMPLING["greedy"]) for i in range(1, 13)]
    found, num_common = {}, []
    for cascade in ("never", "always"):
        engine = make_engine(cascade=cascade, cudagraph_mode=mode, speculate=speculate, k=3 if speculate else None)
        tokens_of(engine, alone)
        launch = engine.core.runner.launch

        def noted(plan: StepPlan, launch: Any = launch) -> Any:
            num_common.append(plan.composition.num_common_pages)
            return launch(plan)

        num_common.clear()
        engine.core.runner.launch = noted  # type: ignore[method-assign]
        found[cascade] = tokens_of(engine, others)
        assert (max(num_common) == 5) is (cascade == "always")
    assert found["always"] == found["never"]


def test_a_closed_engine_leaves_its_memory_to_the_next(folder: Path) -> None:
    """Each takes more than half of the GPU."""
    torch.cuda.empty_cache()
    before, page_bytes = torch.cuda.mem_get_info()[0], 512 * 384
    for _ in range(2):
        size = {"block_size": 512, "num_gpu_blocks_override": int(0.6 * before) // page_bytes}
        with LLM(str(folder), dtype="float32", **size) as llm:
            assert torch.cuda.mem_get_info()[0] < 0.5 * before
            assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids) == 5
    assert torch.cuda.mem_get_info()[0] > 0.95 * before


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_tokens_of_the_cpu(
    make_engine: MakeEngine, expected: dict[str, list[int]], mode: str, steps_in_flight: int
) -> None:
    engine = make_engine(cudagraph_mode=mode, steps_in_flight=steps_in_flight)
    assert tokens_of(engine, some_requests()) == expected
    while engine.core.use_idle_time():
        pass
    assert (
        tokens_of(engine, some_requests()) == expected
    )  # now in the graphs that were recorded since, and from the cache


@pytest.mark.parametrize("end", ["length", "abort"])
def test_graphs_recorded_after_any_last_step(make_engine: MakeEngine, expected: dict[str, list[int]], end: str) -> None:
    """A warm-up really runs: it must find neither the last step's tokens nor a row that still believes it runs."""
    core = make_engine().core
    core.add(make_request("long", range(200), 1 if end == "length" else 50))
    core.step()
    core.finish("long")
    while core.has_work:
        core.step()
    before = core.runner.rows.num_computed.clone()
    while core.use_idle_time():
        pass
    assert torch.equal(core.runner.rows.num_computed, before)
    assert {i: outcome.token_ids for i, outcome in run(core, some_requests()).items()} == expected


def test_two_engines_at_once(
    make_engine: MakeEngine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its streams; what kernels count in must not be shared between them."""
    monkeypatch.delenv(
        "SLIPSTREAM_SYNC_CHECK"
    )  # the detector is the process's, and one may wait while the other launches
    engines = [make_engine(), make_engine()]
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            for found in pool.map(lambda engine: tokens_of(engine, some_requests()), engines):
                assert found == expected


def test_chunks_of_prompts(make_engine: MakeEngine, expected: dict[str, list[int]]) -> None:
    engine = make_engine(max_num_batched_tokens=16, enable_prefix_caching=False)
    assert tokens_of(engine, some_requests()) == expected


def test_long_prompts_in_graphs(make_engine: MakeEngine, folder: Path) -> None:
    rng = random.Random(8)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 480))] for _ in range(40)]
    requests = [make_request(f"r{i}", prompt, 1 + i % 9, seed=i) for i, prompt in enumerate(prompts)]
    options = {"model": str(folder), "device": "cpu", "dtype": "float64", "max_num_seqs": 16}
    wanted = tokens_of(build_engine(EngineOptions.from_dict(options)), requests)
    sizes = {"max_num_batched_tokens": 4096, "cudagraph_capture_sizes": (4, 16, 64, 256, 1024, 4096)}
    core = make_engine(**sizes, enable_prefix_caching=False).core
    while core.use_idle_time():
        pass
    chosen = []
    choose = core.runner.graphs.choose
    core.runner.graphs.choose = lambda *about: chosen.append(choose(*about)) or chosen[-1]  # type: ignore[method-assign]
    assert {i: outcome.token_ids for i, outcome in run(core, requests).items()} == wanted
    assert {choice.desc.mode.value for choice in chosen} == {"full"}
    assert max(choice.desc.num_tokens for choice in chosen) > 512


def test_preemption(make_engine: MakeEngine, expected: dict[str, list[int]]) -> None:
    engine = make_engine(num_gpu_blocks_override=9)
    assert tokens_of(engine, some_requests()) == expected
    assert engine.core.stats.num_preemptions > 0


def test_prefix_hits(make_engine: MakeEngine) -> None:
    prompt = [7 * i % 251 for i in range(100)]
    requests = [make_request(f"r{i}", [*prompt, i], 10) for i in range(6)]
    cold = make_engine(enable_prefix_caching=False)
    warm = make_engine()
    tokens_of(warm, [make_request("first", prompt, 2)])
    assert tokens_of(warm, requests) == tokens_of(cold, requests)
    assert warm.core.stats.num_cached_tokens >= 6 * 96


def test_aborts_in_flight(make_engine: MakeEngine, expected: dict[str, list[int]]) -> None:
    core = make_engine(steps_in_flight=3).core
    for request in some_requests():
        core.add(request)
    for i in range(12):
        core.step()
        core.finish(f"r{i}")
    while core.has_work:
        core.step()
    assert tokens_of_again(core) == expected


def tokens_of_again(core: Any) -> dict[str, list[int]]:
    return {i: outcome.token_ids for i, outcome in run(core, some_requests()).items()}


@pytest.mark.parametrize("name", _SAMPLING)
def test_every_sampling_parameter(make_engine: MakeEngine, folder: Path, name: str) -> None:
    requests = [make_request(f"r{i}", range(i, 40 + i), 20, seed=i, **_SAMPLING[name]) for i in range(5)]
    on_cpu = build_engine(EngineOptions(model=str(folder), device="cpu", dtype="float64", max_num_seqs=16))
    assert tokens_of(make_engine(), requests) == tokens_of(on_cpu, requests)


def test_log_probabilities(make_engine: MakeEngine, folder: Path) -> None:
    def probabilities(engine: Engine) -> list[Any]:
        engine.core.add(make_request("r", range(30), 5, logprobs=4, prompt_logprobs=2))
        found = []
        while engine.core.has_work:
            for update in engine.core.step():
                found += list(update.logprobs or [])
                if update.prompt_logprobs is not None:
                    found += update.prompt_logprobs[1]
        return found

    on_cpu = build_engine(EngineOptions(model=str(folder), device="cpu", dtype="float64", max_num_seqs=16))
    for mine, theirs in zip(probabilities(make_engine()), probabilities(on_cpu), strict=True):
        assert mine.rank == theirs.rank
        assert mine.values == pytest.approx(theirs.values, abs=1e-4)


@pytest.mark.parametrize("variant", tiny_models.VARIANTS if tiny_models is not None else [])
def test_architectures(make_engine: MakeEngine, tmp_path: Path, variant: str) -> None:
    folder = tiny_models.save(tiny_models.build(variant), tmp_path)
    on_cpu = build_engine(EngineOptions(model=str(folder), device="cpu", dtype="float64", max_num_seqs=16))
    requests = [make_request(f"r{i}", [(31 * i + 7 * j) % 256 for j in range(10 + 15 * i)], 16) for i in range(5)]
    assert tokens_of(make_engine(model=str(folder)), requests) == tokens_of(on_cpu, requests)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(make_engine: MakeEngine, dtype: str) -> None:
    outcomes = run(make_engine(dtype=dtype).core, some_requests())
    assert all(outcome.error is None and outcome.finish_reason for outcome in outcomes.values())


def test_memory_is_measured(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_model_len=None)
    free, total = torch.cuda.mem_get_info()
    cache = (
        engine.config.cache.num_pages
        * engine.config.cache.page_size
        * engine.config.model.kv_bytes_per_token("float32")
    )
    assert cache < total
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization"):
        make_engine(gpu_memory_utilization=0.001)
    with pytest.raises(ConfigError, match="or kv_cache_memory_bytes"):
        make_engine(num_gpu_blocks_override=2 * total // 1000)
    # Unpredictable: the memory is gone when it is requested.
    monkeypatch.setattr("slipstream.engine.build.randomize_weights", None)
    monkeypatch.setattr("slipstream.engine.build.build_model", lambda *_: torch.empty(1 << 46, device="cuda"))
    with pytest.raises(ConfigError, match="lower gpu_memory_utilization"):
        make_engine()
    assert free > 0
