"""OpenAI's own client against the server: what works there works with any client."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI

from slipstream.llm import LLM
from slipstream.sampling_params import SamplingParams

from .conftest import MODEL_NAME, RunningServer

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_models(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL_NAME
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.models.retrieve("other")


def test_the_server_says_what_the_engine_says(client: OpenAI, model_folder: object) -> None:
    with LLM(str(model_folder)) as llm:
        expected = llm.generate("some text", SamplingParams(temperature=0, max_tokens=12))[0]
        expected_chat = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12))[0]
    answer = client.completions.create(model=MODEL_NAME, prompt="some text", temperature=0, max_tokens=12)
    assert answer.choices[0].text == expected.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    chat = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=0, max_tokens=12)
    assert chat.choices[0].message.content == expected_chat.text
    assert chat.choices[0].finish_reason in ("stop", "length")


def test_a_stream_is_the_answer_in_pieces(client: OpenAI) -> None:
    settings = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(messages=MESSAGES, **settings)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **settings
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    pieces = client.completions.create(prompt="abc", stream=True, **settings)  # type: ignore[call-overload]
    text = "".join(piece.choices[0].text for piece in pieces)
    assert text == client.completions.create(prompt="abc", **settings).choices[0].text  # type: ignore[call-overload]


def test_logprobs(client: OpenAI) -> None:
    settings = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 5}
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **settings)  # type: ignore[call-overload]
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob), "greedy takes the likeliest"
    stream = client.chat.completions.create(messages=MESSAGES, logprobs=True, stream=True, **settings)  # type: ignore[call-overload]
    told = [e for c in stream if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.logprob for e in told] == pytest.approx([e.logprob for e in content])
    plain = client.completions.create(prompt="abc", logprobs=2, **settings)  # type: ignore[call-overload]
    assert len(plain.choices[0].logprobs.tokens) == len(plain.choices[0].logprobs.text_offset) == 5


def test_n_and_seed(client: OpenAI) -> None:
    def ask(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, n=3, seed=seed, temperature=1.0, max_tokens=8
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content or "" for choice in answer.choices]

    first = ask(7)
    assert len(set(first)) > 1
    assert ask(7) == first
    assert ask(8) != first


def test_several_prompts(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL_NAME, prompt=["one", "two", "three"], n=2, max_tokens=3, temperature=0
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    single = client.completions.create(model=MODEL_NAME, prompt="two", max_tokens=3, temperature=0)
    assert answer.choices[2].text == answer.choices[3].text == single.choices[0].text


def test_stop(client: OpenAI) -> None:
    settings = {"model": MODEL_NAME, "prompt": "abc", "temperature": 0, "max_tokens": 30}
    free = client.completions.create(**settings).choices[0].text  # type: ignore[call-overload]
    stop = free[6:8]
    cut = client.completions.create(stop=[stop, "never said"], **settings).choices[0]  # type: ignore[call-overload]
    assert cut.text == free[: free.index(stop)]
    assert cut.finish_reason == "stop"


def test_extensions(client: OpenAI) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.01,
        "ignore_eos": True,
        "priority": 1,
        "speculate": False,
        "max_k": 3,
        "min_tokens": 4,
    }
    answer = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=9, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    # This server's engine does not draft: the switches are taken, and there is nothing to say of drafts.
    assert answer.usage.completion_tokens_details is None
    assert not hasattr(answer.choices[0], "speculation")


def test_null_means_unset(client: OpenAI) -> None:
    extra = {"n": None, "stream": None, "seed": -1, "stop": None, "min_tokens": None, "logit_bias": None}
    answer = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=3, extra_body=extra)
    assert len(answer.choices) == 1


def test_tools_reach_the_template(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,
        max_tokens=2,
        tools=[tool],
        tool_choice="auto",  # type: ignore[list-item]
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tempertaure": 1.0}, "unknown field 'tempertaure'; did you mean 'temperature'?"),
        ({"stream_options": {"include_usag": True}}, "unknown field 'stream_options.include_usag'"),
        ({"temperature": -1}, "temperature: .* greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n: .* greater than or equal to 1"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}}},
            "uniqueItems",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs: this regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "not regex and choice"),
        ({"structured_outputs": {"jsn": {}}}, "unknown field 'structured_outputs.jsn'"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "not both"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"logit_bias": {"100000": 1.0}}, "logit_bias holds 100000"),
        ({"logit_bias": {"x": 1.0}}, "not a token id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "the context holds 512; shorten the prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text content is supported"),
    ],
)
def test_errors_name_the_field_and_the_way_out(client: OpenAI, extra: dict[str, object], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, extra_body=extra)
    assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)


def test_an_unsupported_option_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="min_tokens 9 is above max_tokens 3; lower it"):
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=3, extra_body={"min_tokens": 9})
