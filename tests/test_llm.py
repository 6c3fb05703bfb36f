from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream import LLM, AsyncLLM, ConfigError, EngineError, RequestError, SamplingParams
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
    ],
)
def test_bad_prompts(llm: LLM, prompt: str | list[int], message: str) -> None:
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
    engine = AsyncLLM(str(folder), dtype="float64", max_num_seqs=4)

    async def one(prompt: str) -> str:
        text = ""
        async for output in engine.generate(prompt, GREEDY):
            text += output.delta_text
        assert output.finished and output.text == text
        return text

    async def everything() -> list[str]:
        return await asyncio.gather(*(one(p) for p in prompts))

    assert asyncio.run(everything()) == expected
    engine.close()


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
    monkeypatch.setattr(llm._client._engine.core, "step", lambda: 1 / 0)
    output = llm.generate("x", GREEDY)[0]
    assert output.finish_reason == "error" and "ZeroDivisionError" in (output.error or "")
    with pytest.raises(EngineError, match="the engine stopped"):
        llm.generate("x", GREEDY)
