from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.engine.build import Engine
from slipstream.errors import RequestError
from slipstream.request import Request
from slipstream.runner.async_output import InFlightStep
from tests.engine.drive import make_request, run

MakeEngine = Callable[..., Engine]


def mixed_requests(count: int = 16) -> list[Request]:
    """Greedy and sampled, short and long, some ending on a stop id."""
    rng = random.Random(5)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 5, 17, 40, 90]))]
        kinds = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.2, "top_p": 0.9}]
        stops = tuple(range(0, 256, 29)) if i % 3 == 0 else ()
        requests.append(make_request(f"r{i}", prompt, rng.choice([1, 7, 24]), stops, seed=i, **kinds[i % 4]))
    return requests


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    return {}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("chunk", [16, 512])
def test_same_tokens_alone_and_in_a_batch(
    make_engine: MakeEngine, alone: dict[str, list[int]], chunk: int, steps_in_flight: int
) -> None:
    """A request's tokens depend on the request alone: not on neighbours, chunk size or steps in flight."""
    if not alone:
        engine = make_engine(max_num_seqs=1)
        for request in mixed_requests():
            alone.update({i: o.token_ids for i, o in run(engine.core, [request]).items()})
    assert len({tuple(tokens) for tokens in alone.values()}) > 10, "requests that all say the same prove nothing"
    engine = make_engine(max_num_batched_tokens=chunk, steps_in_flight=steps_in_flight)
    batched = {i: o.token_ids for i, o in run(engine.core, mixed_requests()).items()}
    assert batched == alone
    engine.core.scheduler.check_idle()


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_same_tokens_under_preemption(make_engine: MakeEngine, steps_in_flight: int) -> None:
    roomy = {i: o.token_ids for i, o in run(make_engine().core, mixed_requests()).items()}
    tight = make_engine(num_gpu_blocks_override=9, steps_in_flight=steps_in_flight)
    assert {i: o.token_ids for i, o in run(tight.core, mixed_requests()).items()} == roomy
    assert tight.core.stats.num_preemptions > 0


def alike_requests() -> list[Request]:
    """Prompts that begin alike, over and over, with every sampling parameter somewhere."""
    rng = random.Random(9)
    stems = [[rng.randrange(256) for _ in range(n)] for n in (16, 40, 70)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "min_p": 0.05},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.7, "presence_penalty": 1.0, "top_k": 30, "top_p": 0.95},
        {"logit_bias": {7: 4.0, 8: -100.0}, "min_tokens": 5, "bad_word_ids": ((7, 7), (30,))},
        {"logprobs": 3, "prompt_logprobs": 2},
    ]
    requests = []
    for i in range(24):
        prompt = stems[i % 3] + [rng.randrange(256) for _ in range(rng.choice([0, 1, 9]))]
        requests.append(make_request(f"r{i}", prompt, rng.choice([3, 20]), (41,), seed=i, **kinds[i % len(kinds)]))
    return requests


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_pages", [12, 400])
def test_same_tokens_with_and_without_prefix_cache(
    make_engine: MakeEngine, steps_in_flight: int, num_pages: int
) -> None:
    """On or off, cold or warm, after preemption, in any order of arrival."""
    requests = alike_requests()
    plain = make_engine(enable_prefix_caching=False)
    expected = run(plain.core, requests)
    assert plain.core.stats.num_cached_tokens == 0
    cached = make_engine(num_gpu_blocks_override=num_pages, steps_in_flight=steps_in_flight, max_num_seqs=5)
    orders = [requests, requests[::-1], random.Random(1).sample(requests, len(requests))]
    for order in orders:
        assert run(cached.core, order) == expected
    stats = cached.core.stats
    assert stats.prefix_hit_rate > 0.3
    assert stats.num_preemptions > 0 or num_pages == 400


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_how_requests_end(make_engine: MakeEngine, steps_in_flight: int) -> None:
    engine = make_engine(steps_in_flight=steps_in_flight)
    tokens = run(engine.core, [make_request("free", [1, 2, 3], 12)])["free"].token_ids
    # A stop id ends the request where it first occurs; it is the last token.
    stop = tokens[5]
    outcome = run(engine.core, [make_request("stop", [1, 2, 3], 12, (stop,))])["stop"]
    assert (outcome.token_ids, outcome.finish_reason) == (tokens[: tokens.index(stop) + 1], "stop")
    assert run(engine.core, [make_request("short", [1, 2, 3], 1)])["short"].token_ids == tokens[:1]
    # More stop ids than the device holds: the last of them counts all the same.
    unused = tuple(t for t in range(256) if t not in tokens)[:20]
    outcome = run(engine.core, [make_request("many", [1, 2, 3], 12, (*unused, stop))])["many"]
    assert (outcome.token_ids, outcome.finish_reason) == (tokens[: tokens.index(stop) + 1], "stop")


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_what_the_engine_counts(make_engine: MakeEngine, steps_in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, then a token a step; the last token is drawn and not computed. Waits are not the host's."""
    core = make_engine(steps_in_flight=steps_in_flight, max_num_batched_tokens=16, enable_prefix_caching=False).core
    collect = InFlightStep.collect
    monkeypatch.setattr(InFlightStep, "collect", lambda step: replace(collect(step), wait_s=100.0))
    run(core, [make_request("a", range(30), 4)])
    stats = core.stats
    assert (stats.num_steps, stats.num_tokens_computed) == (2 + 3, 30 + 3)
    assert (stats.num_tokens_out, stats.num_requests_finished, stats.num_prompt_tokens) == (4, 1, 30)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages == stats.num_pages > 0
    assert sum(stats.step_s.counts) == sum(stats.host_s.counts) == stats.num_steps
    assert stats.step_s.total - stats.host_s.total == pytest.approx(100.0 * stats.num_steps)


def test_context_limit_ends_a_request(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=40)
    request = make_request("r", range(30), 10)
    outcome = run(engine.core, [request])["r"]
    assert (len(outcome.token_ids), outcome.finish_reason) == (10, "length")


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_nan_fails_one_request_alone(make_engine: MakeEngine, steps_in_flight: int) -> None:
    engine = make_engine(steps_in_flight=steps_in_flight)
    good = [make_request(f"good{i}", [5 + i, 6, 7], 10, temperature=float(i % 2)) for i in range(3)]
    expected = run(engine.core, good)
    with torch.inference_mode():  # requests with this token get NaN logits
        engine.core.runner.program.model.model.embed_tokens.weight[200] = torch.nan  # type: ignore[attr-defined]
    outcomes = run(engine.core, [*good, make_request("bad", [1, 200, 3], 10)])
    assert outcomes["bad"].finish_reason == "error" and not outcomes["bad"].token_ids
    assert "not numbers" in (outcomes["bad"].error or "")
    for request in good:
        assert outcomes[request.request_id] == expected[request.request_id]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_a_failed_step_has_computed_is_not_found_again(make_engine: MakeEngine, steps_in_flight: int) -> None:
    """A fault that passes, as one of the memory: the same prompt, sent again, is computed anew and answered."""
    prompt = [3 + i % 7 for i in range(40)]
    expected = run(make_engine().core, [make_request("a", prompt, 10)])["a"]
    core = make_engine(steps_in_flight=steps_in_flight).core
    weight = core.runner.program.model.model.embed_tokens.weight  # type: ignore[attr-defined]
    with torch.inference_mode():
        good = weight[4].clone()
        weight[4] = torch.nan
        assert run(core, [make_request("a", prompt, 10)])["a"].finish_reason == "error"
        weight[4] = good
    assert run(core, [make_request("a", prompt, 10)])["a"] == expected
    assert core.stats.num_cached_tokens == 0
    core.scheduler.check_idle()


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_abort_at_any_time(make_engine: MakeEngine, steps_in_flight: int) -> None:
    """Abort each request after a random number of steps; the others are not touched and nothing leaks."""
    requests = mixed_requests()
    expected = run(make_engine().core, requests)
    rng = random.Random(1)
    for _ in range(5):
        core = make_engine(steps_in_flight=steps_in_flight, num_gpu_blocks_override=40, max_num_seqs=4).core
        for request in requests:
            core.add(request)
        victims = {r.request_id: rng.randrange(60) for r in rng.sample(requests, 8)}
        found: dict[str, list[int]] = {r.request_id: [] for r in requests}
        step = 0
        while core.has_work:
            for victim in [v for v, when in victims.items() if when == step]:
                core.finish(victim)
            for update in core.step():
                found[update.request_id] += update.token_ids
            step += 1
        core.scheduler.check_idle()
        for request_id, outcome in expected.items():
            tokens = found[request_id]
            assert tokens == outcome.token_ids[: len(tokens)]
            assert request_id in victims or tokens == outcome.token_ids


def test_a_row_and_its_pages_are_used_again(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2, num_gpu_blocks_override=16)
    expected = run(make_engine().core, mixed_requests())
    assert run(engine.core, mixed_requests()) == expected


def test_cache_too_small_for_one_request_says_so(make_engine: MakeEngine) -> None:
    core = make_engine(num_gpu_blocks_override=2).core
    with pytest.raises(RequestError, match=r"may grow to 50 tokens, but the KV cache holds 32; lower max_tokens"):
        core.add(make_request("big", range(40), 10))
    core.add(make_request("small", range(20), 12))
    with pytest.raises(RequestError, match="already in use"):
        core.add(make_request("small", range(20), 12))


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_an_id_that_is_used_again_is_another_request(make_engine: MakeEngine, steps_in_flight: int) -> None:
    """Equally long prompts in the same row: nothing that was kept of the first request may serve the second."""
    drawn = {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.3}
    expected = run(make_engine().core, [make_request("a", range(50, 60), 12, seed=3, **drawn)])["a"].token_ids
    core = make_engine(steps_in_flight=steps_in_flight).core
    run(core, [make_request("a", range(10, 20), 12)])
    found = run(core, [make_request("a", range(50, 60), 12, seed=3, **drawn)])["a"].token_ids
    assert found == expected
