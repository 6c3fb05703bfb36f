"""Law 10 and 11: the same tokens with any drafter, any number of drafts and none, whatever parameters a request has.

On a CPU in float64, where batching changes no token by rounding: chunked prompts, prefix hits, preemption, two steps in
flight. The whole matrix is in `make test-slow`, a part of it here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.build import Engine
from slipstream.request import Request
from tests.engine.drive import Outcome, make_request, run

MakeEngine = Callable[..., Engine]

ALL_AT_ONCE: dict[str, Any] = {
    "temperature": 0.8,
    "top_n_sigma": 2.5,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
    "logit_bias": {7: 2.0, 8: -100.0, 65: 1.0},
    "bad_word_ids": ((30,), (65, 66), (9, 9, 9)),
    "min_tokens": 4,
    "logprobs": 3,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "cut": {"temperature": 0.8, "top_n_sigma": 1.5},
    "all": ALL_AT_ONCE,
}


def random_requests(kind: str, count: int) -> list[Request]:
    """Prompts that begin alike and repeat themselves, limits and stop ids that fall into the middle of drafts."""
    rng = random.Random(kind)
    stems = [[rng.randrange(256) for _ in range(n)] for n in (16, 33, 50)]
    requests = []
    for i in range(count):
        own = [rng.randrange(256) for _ in range(rng.choice([1, 4, 9, 20]))]
        prompt = rng.choice([[], *stems]) + own * rng.choice([1, 1, 3])
        stops = tuple(rng.sample(range(256), rng.choice([0, 0, 2, 20])))
        limits: dict[str, Any] = {"speculate": rng.random() < 0.9, "max_k": rng.choice([None, None, 2])}
        if i % 7 == 0:
            limits["prompt_logprobs"] = 1
        params = {**KINDS[kind], **limits}
        if len(stops) > 16:
            params.pop("min_tokens", None)  # a long list is the host's, which holds nothing back
        requests.append(make_request(f"r{i}", prompt, rng.choice([1, 8, 30, 60]), stops, seed=i, **params))
    return requests


_PLAIN: dict[tuple[float, str, int], dict[str, Outcome]] = {}


def plain_outcomes(make_engine: MakeEngine, kind: str, count: int) -> dict[str, Outcome]:
    engine = make_engine(enable_prefix_caching=False)
    matrix = engine.core.runner.program.model.output.dequantised()  # targets of different weights say different things
    key = (float(matrix.double().sum()), kind, count)
    if key not in _PLAIN:
        _PLAIN[key] = run(engine.core, random_requests(kind, count))
    return _PLAIN[key]


def check(make_engine: MakeEngine, kind: str, count: int, speculative: dict[str, Any], **options: Any) -> Engine:
    """Against plain decoding, with too few pages for all and the steps in flight that make bounds bounds."""
    expected = plain_outcomes(make_engine, kind, count)
    engine = make_engine(
        **options,
        speculative_config=speculative,
        steps_in_flight=2,
        max_num_batched_tokens=80,
        long_prefill_token_threshold=24,
        block_size=8,
        num_gpu_blocks_override=22,
    )
    found = run(engine.core, random_requests(kind, count))
    for name, outcome in expected.items():
        assert found[name] == outcome, name
    assert engine.core.stats.num_preemptions > 0
    assert engine.core.stats.num_cached_tokens > 0
    return engine


def config_of(method: str, k: int, folders: dict[str, Path]) -> dict[str, Any]:
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": k}
    return {"method": "draft_model", "model": str(folders[method]), "num_speculative_tokens": k}


@pytest.fixture
def folders(near_folder: Path, small_folder: Path) -> dict[str, Path]:
    return {"near": near_folder, "small": small_folder}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "k"), [("ngram", 3), ("near", 1), ("near", 5), ("small", 3)])
def test_the_same_tokens_with_and_without_drafts(
    make_engine: MakeEngine, folders: dict[str, Path], method: str, k: int, kind: str
) -> None:
    engine = check(make_engine, kind, 24, config_of(method, k, folders))
    stats = engine.core.stats
    assert stats.num_draft_tokens > 30
    if method == "near":
        assert stats.num_accepted_tokens > 0.3 * stats.num_draft_tokens, "a drafter that is never right proves little"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("method", ["ngram", "near", "small"])
def test_two_hundred_requests(
    make_engine: MakeEngine, folders: dict[str, Path], method: str, k: int, kind: str
) -> None:
    check(make_engine, kind, 200, config_of(method, k, folders))


IN_GRAPHS = {"device": "sim", "cudagraph_mode": "full", "cudagraph_capture_sizes": (4, 12, 32, 80)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "k"), [("ngram", 3), ("near", 5)])
def test_the_same_tokens_in_graphs_on_a_device_that_runs_later(
    make_engine: MakeEngine, folders: dict[str, Path], method: str, k: int, kind: str
) -> None:
    """The real model on the simulated device, which refuses every wait and every stale byte."""
    engine = check(make_engine, kind, 24, config_of(method, k, folders), **IN_GRAPHS)
    assert engine.core.runner.device.sync_guard.num_violations == 0


@pytest.mark.parametrize(
    ("method", "kind", "where"), [("ngram", "all", {}), ("near", "sampled", {}), ("near", "greedy", IN_GRAPHS)]
)
def test_the_same_tokens_however_many_are_drafted_from_step_to_step(
    make_engine: MakeEngine,
    folders: dict[str, Path],
    method: str,
    kind: str,
    where: dict[str, Any],
    any_lengths: None,
) -> None:
    engine = check(make_engine, kind, 24, config_of(method, 5, folders) | {"adaptive": True}, **where)
    stats = engine.core.stats
    assert stats.num_draft_tokens > 10
    if method == "near":  # with gaps in its cache, closed or not, it must still be as good as ever
        assert stats.num_accepted_tokens > 0.3 * stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("method", ["ngram", "near"])
def test_two_hundred_requests_in_graphs(
    make_engine: MakeEngine, folders: dict[str, Path], method: str, k: int, kind: str
) -> None:
    check(make_engine, kind, 200, config_of(method, k, folders), **IN_GRAPHS)


@pytest.mark.parametrize("verify", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_the_target_is_always_right(
    make_engine: MakeEngine, target_folder: Path, verify: str, temperature: float
) -> None:
    speculative = {"method": "draft_model", "model": str(target_folder), "num_speculative_tokens": 4, "verify": verify}
    engine = make_engine(speculative_config=speculative, steps_in_flight=2, num_gpu_blocks_override=60)
    rng = random.Random(1)
    requests = [
        make_request(f"r{i}", [rng.randrange(256) for _ in range(9)], 40, temperature=temperature, seed=i)
        for i in range(12)
    ]
    run(engine.core, requests)
    stats = engine.core.stats
    assert stats.num_draft_tokens > 300
    assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.parametrize("method", ["ngram", "near"])
def test_greedy_requests_are_the_same_under_rejection(
    make_engine: MakeEngine, folders: dict[str, Path], method: str
) -> None:
    """Where there is nothing to draw, both ways of checking drafts are one."""
    check(make_engine, "greedy", 24, {**config_of(method, 3, folders), "verify": "rejection"})


def test_who_does_not_speculate_is_left_alone(make_engine: MakeEngine, near_folder: Path) -> None:
    """Alone, such requests run without draft slots; beside others, with unused ones."""
    speculative = {"method": "draft_model", "model": str(near_folder), "num_speculative_tokens": 3}
    engine = make_engine(speculative_config=speculative)
    prompts = [[5, 6, 7, i] for i in range(4)]
    silent = [make_request(f"s{i}", p, 12, speculate=False) for i, p in enumerate(prompts)]
    run(engine.core, silent)
    assert engine.core.stats.num_draft_tokens == 0
    assert engine.core.stats.num_tokens_computed == sum(len(p) + 11 for p in prompts)
    mixed = [make_request(f"m{i}", p, 12, max_k=0 if i % 2 else None) for i, p in enumerate(prompts)]
    updates = []
    for request in mixed:
        engine.core.add(request)
    while engine.core.has_work:
        updates += engine.core.step()
    drafted = {update.request_id for update in updates if update.num_drafts}
    assert drafted == {"m0", "m2"}


@pytest.mark.parametrize("verify", ["match", "rejection"])
def test_a_prompt_of_which_one_token_is_left_is_drafted_with_noise(
    make_engine: MakeEngine, target_folder: Path, verify: str
) -> None:
    """Its step draws nothing, so nothing else in it requires noise."""
    speculative = {"method": "draft_model", "model": str(target_folder), "num_speculative_tokens": 3, "verify": verify}
    engine = make_engine(speculative_config=speculative, long_prefill_token_threshold=8)
    for seed in range(12):
        run(engine.core, [make_request(f"r{seed}", range(1, 10), 4, seed=seed, temperature=2.0)])
    stats = engine.core.stats
    assert stats.num_draft_tokens > 30
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_a_drafter_with_fewer_tokens_than_the_target(
    make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Siblings pad their vocabularies differently. What the drafter does not know it drafts badly, no more."""
    from tests import tiny_models

    small = tiny_models.save(tiny_models.build("llama", vocab_size=264), tmp_path_factory.mktemp("fewer"))
    requests = [make_request(f"r{i}", [270, 5, 271, i], 30, seed=i, temperature=1.5) for i in range(6)]
    plain = run(make_engine().core, requests)
    for verify in ("match", "rejection"):
        speculative = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 3, "verify": verify}
        outcomes = run(make_engine(speculative_config=speculative).core, requests)
        assert verify == "rejection" or outcomes == plain
        assert any(token >= 264 for outcome in outcomes.values() for token in outcome.token_ids)
