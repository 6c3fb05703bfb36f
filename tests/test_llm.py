from __future__ import annotations

import asyncio
import json
import queue
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream import LLM, AsyncLLM, ConfigError, EngineError, RequestError, SamplingParams
from slipstream.output import RequestOutput
from tests import tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float64", max_num_seqs=8) as llm:
        yield llm


def test_generate_takes_text_ids_and_lists(llm: LLM) -> None:
    one = llm.generate("hello", GREEDY)
    ids = llm.generate(llm.tokenizer.encode("hello"), GREEDY)
    many = llm.generate(["hello", "world"], GREEDY)
    assert len(one) == len(ids) == 1 and len(many) == 2
    assert one[0].token_ids == ids[0].token_ids == many[0].token_ids
    output = one[0]
    assert output.finished and output.finish_reason == "length" and len(output.token_ids) == 12
    assert output.prompt == "hello" and output.prompt_token_ids == llm.tokenizer.encode("hello")
    assert output.timings.first_token_s is not None
    assert 0 < output.timings.first_token_s <= output.timings.total_s


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    output = llm.generate("abc", GREEDY)[0]
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_chat_applies_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    output = llm.chat(conversation, GREEDY)[0]
    prompt = llm.tokenizer.render_chat(conversation)
    assert prompt == "<s>user: hi</s><s>assistant: "
    assert output.prompt_token_ids == llm.tokenizer.encode(prompt, add_special_tokens=False)
    assert [o.token_ids for o in llm.chat([conversation, conversation], GREEDY)] == [output.token_ids] * 2


def test_seed_makes_sampling_repeatable(llm: LLM) -> None:
    def tokens(seed: int | None) -> list[int]:
        return llm.generate("x", SamplingParams(temperature=1.0, max_tokens=12, seed=seed, ignore_eos=True))[
            0
        ].token_ids

    assert tokens(3) == tokens(3) != tokens(4)
    assert tokens(None) != tokens(None), "without a seed every request draws its own"
    reported = llm.generate("x", SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))[0]
    assert tokens(reported.seed) == reported.token_ids


def test_stop_strings_trim_text_and_tokens(llm: LLM) -> None:
    free = llm.generate("stop test", GREEDY)[0]
    target = free.text[3:5]
    for stop in (target, [target, "never"]):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)  # type: ignore[arg-type]
        output = llm.generate("stop test", params)[0]
        assert output.finish_reason == "stop" and output.outputs[0].stop_reason == target
        assert output.text == free.text[: free.text.index(target)]
        assert output.token_ids == free.token_ids[: len(output.token_ids)]
        assert target in llm.tokenizer.decode(output.token_ids)
        assert target not in llm.tokenizer.decode(output.token_ids[:-1])


def test_stop_string_can_be_shown(llm: LLM) -> None:
    free = llm.generate("stop test", GREEDY)[0]
    target = free.text[3:5]
    params = replace(GREEDY, stop=(target,), include_stop_str_in_output=True)
    assert llm.generate("stop test", params)[0].text == free.text[: free.text.index(target) + len(target)]


def test_special_tokens_can_be_shown(llm: LLM) -> None:
    params = replace(GREEDY, logit_bias={tiny_models.EOS_ID: 100.0}, max_tokens=3)
    assert llm.generate("x", params)[0].text == ""
    assert llm.generate("x", replace(params, skip_special_tokens=False))[0].text == "</s></s></s>"


def test_several_continuations_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, seed=5, n=4, ignore_eos=True)
    output = llm.generate("hello", params)[0]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    texts = [tuple(c.token_ids) for c in output.outputs]
    assert len(set(texts)) == 4, "each draws its own noise"
    # The first is what n = 1 gives, and all are repeatable.
    assert llm.generate("hello", replace(params, n=1))[0].token_ids == list(texts[0])
    assert [tuple(c.token_ids) for c in llm.generate("hello", params)[0].outputs] == texts
    assert len(llm.generate(["a", "b"], replace(params, n=2))) == 2
    last = list(llm.stream("hello", params))[-1]
    assert [tuple(c.token_ids) for c in last.outputs] == texts and last.finished


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model.eval()


@pytest.mark.parametrize("chunk", [7, 512])
def test_logprobs_are_the_models_own(folder: Path, reference: PreTrainedModel, chunk: int) -> None:
    """Of outputs and prompt, whatever the sampling parameters, against transformers."""
    params = SamplingParams(
        temperature=0.8,
        top_k=9,
        repetition_penalty=1.2,
        seed=2,
        max_tokens=9,
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=2,
    )
    prompt = [5, 9, 200, 31, 7, 7, 100, 12, 13, 14, 15, 99, 250, 1, 2, 3, 8, 6, 20]
    options = {"dtype": "float64", "long_prefill_token_threshold": chunk}
    with LLM(str(folder), **options) as llm:
        llm.generate([prompt], replace(params, prompt_logprobs=None))  # a warm prefix cache must not matter
        output = llm.generate([prompt], params)[0]
        assert (
            llm.generate([prompt], replace(params, logprobs=None, prompt_logprobs=None))[0].outputs[0].logprobs is None
        )
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + output.token_ids])).logits[0].log_softmax(1)
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == 9
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    tokens = prompt + output.token_ids
    found = [*output.prompt_logprobs[1:], *completion.logprobs]
    for position, logprobs in enumerate(found):
        token, row = tokens[position + 1], expected[position]
        assert logprobs is not None and next(iter(logprobs)) == token
        order = row.argsort(descending=True).tolist()
        top = 2 if position < len(prompt) - 1 else 4
        assert set(logprobs) == {token, *order[:top]}
        for token_id, entry in logprobs.items():
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert entry.rank == order.index(token_id) + 1
            assert entry.text == llm.tokenizer.decode([token_id], skip_special_tokens=False)


def test_prompt_logprobs_survive_preemption(folder: Path) -> None:
    """A preempted request computes its prompt again; nothing is reported twice."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=0)
    prompts = [[i, *range(1, 50)] for i in range(4)]
    with LLM(str(folder), dtype="float64") as llm:
        expected = llm.generate(prompts, params)
    with LLM(str(folder), dtype="float64", num_gpu_blocks_override=14) as llm:
        found = llm.generate(prompts, params)
        assert llm.stats.num_preemptions > 0
    assert [o.prompt_logprobs for o in found] == [o.prompt_logprobs for o in expected]
    assert all(o.prompt_logprobs is not None and len(o.prompt_logprobs) == 50 for o in found)


def test_seeds_differ_between_runs_unless_the_engine_is_seeded(folder: Path) -> None:
    def drawn(**options: Any) -> int:
        with LLM(str(folder), **options) as llm:
            return llm.generate("x", replace(GREEDY, max_tokens=1))[0].seed

    assert drawn() != drawn()
    assert drawn(seed=7) == drawn(seed=7)


def test_bad_words_and_min_tokens(llm: LLM) -> None:
    free = llm.generate("abc", GREEDY)[0]
    word = llm.tokenizer.decode(free.token_ids[2:4])
    output = llm.generate("abc", replace(GREEDY, bad_words=(word,)))[0]
    assert word not in output.text and output.token_ids[:3] == free.token_ids[:3]
    ends = SamplingParams(temperature=0, max_tokens=9, logit_bias={tiny_models.EOS_ID: 100.0})
    assert len(llm.generate("abc", ends)[0].token_ids) == 1
    output = llm.generate("abc", replace(ends, min_tokens=4))[0]
    assert len(output.token_ids) == 5 and output.finish_reason == "stop"
    assert tiny_models.EOS_ID not in output.token_ids[:4]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bad_words": ["longer than eight"]}, "bad word 'longer than eight' has 17 tokens; at most 8"),
        ({"bad_words": [chr(97 + i) for i in range(20)]}, "bad_words has 40 spellings"),
        ({"logit_bias": {99999: 1.0}}, "logit_bias holds 99999, which is not a token id below 272"),
        ({"min_tokens": 2, "stop_token_ids": list(range(20))}, "min_tokens works with at most 16 stop token ids"),
    ],
)
def test_limits_are_said(llm: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate("x", SamplingParams.from_dict(params))


def test_fewer_tokens_than_asked_for_are_a_warning(llm: LLM) -> None:
    (output,) = llm.generate([[1] * 507], SamplingParams(max_tokens=99, temperature=0, ignore_eos=True))
    assert output.warning == "max_tokens was lowered from 99 to 5: the context holds 512 tokens, 507 are the prompt"
    assert len(output.token_ids) == 5
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0))
    assert output.warning is None


def test_cached_tokens_are_reported(folder: Path) -> None:
    with LLM(str(folder)) as llm:
        prompt = list(range(50))
        assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0
        assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 48
        assert llm.stats.prefix_hit_rate == pytest.approx(48 / 100)


def test_generation_config_gives_defaults(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build("llama"), tmp_path / "model")
    greedy_settings = {"do_sample": True, "temperature": 0.7, "top_k": 1, "repetition_penalty": 1.5, "eos_token_id": 9}
    (folder / "generation_config.json").write_text(json.dumps(greedy_settings))
    with LLM(str(folder), dtype="float64") as llm:
        defaults = llm.generate("abc", SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
        explicit = SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=12, ignore_eos=True)
        assert defaults == llm.generate("abc", explicit)[0].token_ids
        bias = {9: 100.0}
        assert llm.generate("abc", SamplingParams(max_tokens=12, logit_bias=bias))[0].finish_reason == "stop"


def test_stop_token_is_in_the_tokens_but_not_in_the_text(llm: LLM) -> None:
    free = llm.generate("abc", GREEDY)[0]
    stop = free.token_ids[4]
    output = llm.generate("abc", SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,)))[0]
    end = free.token_ids.index(stop) + 1
    assert output.token_ids == free.token_ids[:end]
    assert output.text == llm.tokenizer.decode(free.token_ids[: end - 1])
    assert output.outputs[0].stop_reason == stop


def test_stream_yields_growing_text_and_may_be_left(llm: LLM) -> None:
    outputs = list(llm.stream("abc", GREEDY))
    assert "".join(o.delta_text for o in outputs) == outputs[-1].text == llm.generate("abc", GREEDY)[0].text
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    for output in llm.stream("abc", SamplingParams(temperature=0, ignore_eos=True)):
        assert output.token_ids
        break
    assert llm.generate("abc", GREEDY)[0].finished  # the abandoned request is gone and the engine goes on


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ("x" * 600, r"the prompt has 600 tokens, the context holds 512; shorten"),
        ([1, 99999], "prompt holds 99999, which is not a token id below 272"),
        ([-1], "not a token id"),
        ([True, 5], "prompt holds True, which is not a token id"),
        ([1, None], "prompt holds None, which is not a token id"),
        ([1.0], "prompt holds 1.0, which is not a token id"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: str | list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], GREEDY)
    with pytest.raises(RequestError, match=f"prompt 1: .*{message}"):
        llm.generate(["fine", prompt], GREEDY)


def test_bad_options(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_num_seq'; did you mean 'max_num_seqs'\?"):
        LLM(str(folder), max_num_seq=3)
    with pytest.raises(ConfigError, match="max_num_seqs must be a positive integer, not 0"):
        LLM(str(folder), max_num_seqs=0)


def test_a_closed_engine_says_so(folder: Path) -> None:
    llm = LLM(str(folder))
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x", GREEDY)


def test_async_streams_run_side_by_side(folder: Path, llm: LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(20)]
    expected = [o.text for o in llm.generate(prompts, GREEDY)]

    async def one(engine: AsyncLLM, prompt: str) -> str:
        text = ""
        async for output in engine.generate(prompt, GREEDY):
            text += output.delta_text
        assert output.finished and output.text == text
        return text

    async def everything() -> list[str]:
        async with AsyncLLM(str(folder), dtype="float64", max_num_seqs=4) as engine:
            return await asyncio.gather(*(one(engine, p) for p in prompts))

    assert asyncio.run(everything()) == expected


@pytest.mark.long
def test_500_requests_through_a_cache_of_a_tenth_of_their_pages(folder: Path) -> None:
    """All finish, right, and no page is lost."""
    rng = random.Random(4)
    sizes = [(rng.choice([1, 8, 30, 120]), rng.choice([1, 5, 20, 60])) for _ in range(500)]
    prompts = [[rng.randrange(256) for _ in range(n)] for n, _ in sizes]
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for _, m in sizes]
    with LLM(str(folder), dtype="float64", max_num_seqs=32) as llm:
        expected = [o.token_ids for o in llm.generate(prompts, params)]
    num_pages = sum(-(-(n + m) // 16) for n, m in sizes) // 10
    engine = AsyncLLM(str(folder), dtype="float64", max_num_seqs=64, num_gpu_blocks_override=num_pages)

    async def one(prompt: list[int], own: SamplingParams) -> list[int]:
        outputs = [output async for output in engine.generate(prompt, own)]
        assert outputs[-1].finish_reason == "length"
        return outputs[-1].token_ids

    async def everything() -> list[list[int]]:
        return await asyncio.gather(*(one(p, own) for p, own in zip(prompts, params, strict=True)))

    assert asyncio.run(everything()) == expected
    stats = engine.stats
    engine.close()
    assert stats.num_requests_finished == 500 and stats.num_free_pages == num_pages
    assert stats.num_preemptions > 0


def test_async_errors_aborts_and_cancellation(folder: Path) -> None:
    engine = AsyncLLM(str(folder), max_num_seqs=4)
    endless = SamplingParams(temperature=0, ignore_eos=True)

    async def scenario() -> None:
        with pytest.raises(RequestError, match="empty"):
            async for _ in engine.generate("", GREEDY):
                pass
        last = None
        async for output in engine.generate("a", endless, request_id="mine"):
            if last is None:
                engine.abort("mine")
            last = output
        assert last is not None and last.finish_reason == "abort"

        async def consume() -> None:
            async for _ in engine.generate("b", endless):
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for output in engine.generate("c", GREEDY, request_id="again"):
            last = output
        assert last.finish_reason == "length"
        # The same id twice at a time is refused; the first one is not harmed.
        first = engine.generate("d", endless, request_id="twice")
        await anext(first)
        with pytest.raises(RequestError, match="already in use"):
            await anext(engine.generate("d", endless, request_id="twice"))
        assert (await anext(first)).token_ids
        await first.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())
    engine.close()


def test_a_broken_engine_fails_its_requests_and_refuses_new_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(str(folder))
    monkeypatch.setattr("threading.excepthook", lambda args: None)  # the thread's own traceback is expected
    monkeypatch.setattr(llm.client.running.core, "step", lambda: 1 / 0)
    output = llm.generate("x", GREEDY)[0]
    assert output.finish_reason == "error" and "ZeroDivisionError" in (output.error or "")
    with pytest.raises(EngineError, match="the engine stopped"):
        llm.generate("x", GREEDY)


def test_ids_of_one_caller_do_not_meet_those_of_another(folder: Path) -> None:
    """Neither continuations, whatever a caller names its request, nor a request that was closed a moment ago."""
    twice = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=20, ignore_eos=True)
    endless = SamplingParams(temperature=0, ignore_eos=True)

    async def last(engine: AsyncLLM, request_id: str | None, params: SamplingParams) -> int:
        outputs = [output async for output in engine.generate("a", params, request_id=request_id)]
        return sum(len(choice.token_ids) for choice in outputs[-1].outputs)

    async def scenario() -> None:
        async with AsyncLLM(str(folder), max_num_seqs=8) as engine:
            names = ["a", "a#1", "a.1", "a-1", "0", "0.1", "1", "request-0", None]
            asked = (last(engine, name, twice) for name in names)
            assert await asyncio.wait_for(asyncio.gather(*asked), 60) == [60] * len(names)
            for _ in range(5):
                stream = engine.generate("a", endless, request_id="same")
                await anext(stream)
                await stream.aclose()
            assert await asyncio.wait_for(last(engine, "same", GREEDY), 60) == 12

    asyncio.run(scenario())


def test_closing_an_async_engine_does_not_hold_up_the_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        closed_in: list[threading.Thread] = []
        async with AsyncLLM(str(folder)) as engine:
            close = engine.close
            monkeypatch.setattr(engine, "close", lambda: (closed_in.append(threading.current_thread()), close()))
        assert closed_in and closed_in[0] is not threading.current_thread()

    asyncio.run(scenario())


def test_an_interrupted_generate_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while answers are waited for: the requests are aborted, and the engine is free for the next."""

    class Interrupted(queue.SimpleQueue[RequestOutput]):
        def get(self, *_: Any, **__: Any) -> RequestOutput:
            raise KeyboardInterrupt

    endless = SamplingParams(temperature=0, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.llm.queue", SimpleNamespace(SimpleQueue=Interrupted))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[i, 2, 3] for i in range(20)], endless)
    assert not llm.client.output.submissions
    core = llm.client.running.core
    for _ in range(400):
        if not core.has_work:
            break
        time.sleep(0.05)
    assert not core.has_work, "requests go on for no reader"
    assert llm.generate("abc", GREEDY)[0].finished


def test_a_stream_that_is_left_late_ends_no_other_request(folder: Path) -> None:
    """Its id was given back by an abort, and is another request's by then."""
    endless = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100)

    async def scenario() -> list[RequestOutput]:
        async with AsyncLLM(str(folder), max_num_seqs=4) as engine:
            first = engine.generate("a", endless, request_id="mine")
            await anext(first)
            engine.abort("mine")
            second = engine.generate("b", endless, request_id="mine")
            outputs = [await anext(second)]
            await first.aclose()
            return outputs + [output async for output in second]

    last = asyncio.run(scenario())[-1]
    assert last.finish_reason == "length" and len(last.token_ids) == 100
