"""The engine as its callers use it: what it is told, and what they are told. A test plays the engine itself."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from slipstream.config import EngineOptions
from slipstream.engine.build import EngineInfo
from slipstream.engine.client import EngineClient
from slipstream.engine.driver import Deliver
from slipstream.engine.resolve import resolve
from slipstream.engine.stats import EngineStats
from slipstream.errors import RequestError
from slipstream.output import RequestOutput, TokenUpdate, TokenUpdates
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from slipstream.text.tokenizer import Tokenizer
from tests.test_config import CPU, MODEL

PROMPT = [ord("x")] * 3


class Letters:
    """One token a letter."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


class PlayedEngine:
    """Keeps what it is told, and says what a test gives it."""

    def __init__(self, deliver: Deliver, options: dict[str, Any]) -> None:
        self.id_prefix: str = options.pop("id_prefix", "")
        config = resolve(EngineOptions.from_dict(options), CPU, MODEL)
        self.info = EngineInfo(config, cast(Tokenizer, Letters()), SamplingParams(), ())
        self.stats = EngineStats()
        self.requests: list[Request] = []
        self.finished: list[str] = []
        self.deliver = deliver

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    def close(self) -> None:
        pass


Outputs = queue.SimpleQueue[RequestOutput]


class Bench:
    def __init__(self, **options: Any) -> None:
        self.client = EngineClient(lambda deliver: PlayedEngine(deliver, options))
        assert isinstance(self.client.running, PlayedEngine)
        self.engine = self.client.running

    def begin(self, name: str | None = None, *, every_token: bool = True, **params: Any) -> tuple[list[str], Outputs]:
        """The ids of its continuations, which are the engine's own, and what its caller gets."""
        outputs, num_known = Outputs(), len(self.engine.requests)
        submission = self.client.prepare(PROMPT, SamplingParams(**params), name)
        self.client.submit(submission, outputs.put, every_token=every_token)
        return [request.request_id for request in self.engine.requests[num_known:]], outputs

    def say(self, request_id: str, text: str, **more: Any) -> None:
        self.engine.deliver(TokenUpdates.from_list([TokenUpdate(request_id, Letters().encode(text), **more)]))

    def say_alone(self, request_id: str, text: str, time: float) -> None:
        """Tokens of a request that goes on, as most updates are: there is nothing else to say of it."""
        self.engine.deliver(TokenUpdates([request_id], [Letters().encode(text)], time=time))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.client.close()


def take(outputs: Outputs) -> RequestOutput:
    return outputs.get(timeout=60)


@pytest.mark.parametrize("id_prefix", ["", "0.0:", "1.0:", "0.1:"])
def test_seeds_are_drawn_anew_unless_the_engine_has_one(id_prefix: str) -> None:
    """Whichever client of the engine draws them."""

    def drawn(**options: Any) -> list[int | None]:
        made = Bench(id_prefix=id_prefix, **options)
        try:
            made.begin()
            made.begin()
            return [request.params.seed for request in made.engine.requests]
        finally:
            made.client.close()

    assert drawn(seed=7) == drawn(seed=7)
    assert not set(drawn()) & set(drawn())


def test_clients_of_an_engine_with_a_seed_draw_their_own() -> None:
    seeds = []
    for id_prefix in ("0.0:", "1.0:", "0.1:"):
        made = Bench(id_prefix=id_prefix, seed=7)
        made.begin()
        seeds.append(made.engine.requests[0].params.seed)
        made.client.close()
    assert len(set(seeds)) == 3


def test_what_came_with_the_first_token_stays(bench: Bench) -> None:
    """When that was, and how much of the prompt was cached: later updates say nothing of either, nor does an abort."""
    (request_id,), outputs = bench.begin("mine")
    arrival = bench.engine.requests[0].arrival_time
    bench.say(request_id, "a", num_cached_tokens=2, time=arrival + 1.5)
    bench.say_alone(request_id, "b", time=arrival + 2.5)
    bench.say(request_id, "c", num_cached_tokens=2, time=arrival + 3.5)
    told = [take(outputs) for _ in range(3)]
    bench.client.abort("mine")
    told.append(take(outputs))
    assert [output.text for output in told] == ["a", "ab", "abc", "abc"]
    for output in told:
        assert output.num_cached_tokens == 2
        assert output.timings.first_token_s == pytest.approx(1.5)


def test_a_request_with_several_continuations_has_the_first_error_of_them(bench: Bench) -> None:
    """One that ends well afterwards does not take it back, and neither does another error."""
    (first, second, third), outputs = bench.begin(n=3, every_token=False)
    bench.say(first, "", finish_reason="error", error="no numbers")
    bench.say(second, "", finish_reason="error", error="something else")
    bench.say(third, "a", finish_reason="length")
    output = take(outputs)
    assert output.error == "no numbers"
    assert [choice.finish_reason for choice in output.outputs] == ["error", "error", "length"]


def test_an_abort_ends_every_continuation_in_the_engine(bench: Bench) -> None:
    """It would go on to the length limit otherwise, for no caller."""
    ids, outputs = bench.begin("mine", n=3)
    bench.client.abort("mine")
    assert bench.engine.finished == ids
    while not (output := take(outputs)).finished:
        pass
    assert [choice.finish_reason for choice in output.outputs] == ["abort"] * 3
    bench.client.abort("mine")
    assert bench.engine.finished == ids


def test_an_id_that_is_used_again_belongs_to_the_later_request(bench: Bench) -> None:
    """The end of the one before, which is told later, does not set it free."""
    _, before = bench.begin("mine")
    bench.client.abort("mine")
    ids, outputs = bench.begin("mine")
    assert take(before).finish_reason == "abort"
    with pytest.raises(RequestError, match="request id 'mine' is already in use"):
        bench.begin("mine")
    bench.client.abort("mine")
    assert take(outputs).finish_reason == "abort"
    assert bench.engine.finished[-1:] == ids


def test_a_caller_that_breaks_loses_its_own_request_alone(bench: Bench) -> None:
    """The engine is told, and another request beside it goes on."""
    submission = bench.client.prepare(PROMPT, SamplingParams())
    told: list[RequestOutput] = []

    def break_at_once(output: RequestOutput) -> None:
        told.append(output)
        raise ValueError("a fault of the caller's")

    bench.client.submit(submission, break_at_once)
    broken = bench.engine.requests[0].request_id
    (good,), outputs = bench.begin()
    bench.say(broken, "a")
    bench.say(broken, "b")
    bench.say(good, "c", finish_reason="length")
    assert take(outputs).text == "c"
    assert bench.engine.finished == [broken]
    assert [output.finish_reason for output in told] == [None, "error"]
    assert "delivering the output failed: ValueError: a fault of the caller's" in (told[-1].error or "")


@pytest.mark.parametrize("token_id", [-1, MODEL.vocab_size, 2**31 - 1])
def test_stop_tokens_outside_of_the_vocabulary_are_refused(bench: Bench, token_id: int) -> None:
    """The device would look for their logits where it holds them back."""
    with pytest.raises(RequestError, match=r"stop_token_ids (holds|must)"):
        bench.begin(stop_token_ids=(5, token_id), min_tokens=2)
    assert not bench.engine.requests


def test_without_max_tokens_a_request_may_be_as_long_as_the_cache_can_hold() -> None:
    """Which may be less than the context: nothing was asked for that cannot be had."""
    bench = Bench(num_gpu_blocks_override=4, block_size=16)
    assert bench.client.config.cache.num_usable_tokens == 64 < bench.client.config.scheduler.max_model_len
    bench.begin(max_tokens=None)
    assert bench.engine.requests[0].max_total_tokens == 64
    with pytest.raises(RequestError, match="the KV cache holds 64"):
        bench.begin(max_tokens=62)
    bench.begin(max_tokens=61)
    bench.client.close()
