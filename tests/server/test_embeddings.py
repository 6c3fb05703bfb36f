"""``/v1/embeddings`` with OpenAI's own client: the vectors of ``LLM.embed``, as numbers and in base64."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from slipstream.llm import LLM

from .conftest import MODEL_NAME, RunningServer

TEXTS = ["hello there", "another text", "a"]


@pytest.fixture
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> dict[str, Any]:
    with LLM(str(model_folder)) as llm:
        return {
            "default": [output.embedding for output in llm.embed(TEXTS)],
            "short": [output.embedding for output in llm.embed(TEXTS, dimensions=7)],
            "mean": [output.embedding for output in llm.embed(TEXTS, pooling="mean", normalize=False)],
            "ids": [llm.tokenizer.encode(text) for text in TEXTS],
        }


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_vectors_of_texts(client: OpenAI, expected: dict[str, Any], encoding: Any) -> None:
    asked = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model=MODEL_NAME, input=TEXTS, **asked)
    assert answer.object == "list" and answer.model == MODEL_NAME
    assert [(one.index, one.object) for one in answer.data] == [(i, "embedding") for i in range(len(TEXTS))]
    for one, vector in zip(answer.data, expected["default"], strict=True):
        found = np.frombuffer(_bytes_of(one.embedding), "<f4") if encoding == "base64" else np.array(one.embedding)
        np.testing.assert_allclose(found, vector, rtol=0, atol=1e-6)
    num_tokens = sum(map(len, expected["ids"]))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def _bytes_of(encoded: Any) -> bytes:
    return base64.b64decode(encoded, validate=True)


def test_token_ids_and_single_texts(client: OpenAI, expected: dict[str, Any]) -> None:
    for given, places in ((TEXTS[0], [0]), (expected["ids"][1], [1]), (expected["ids"], [0, 1, 2])):
        answer = client.embeddings.create(model=MODEL_NAME, input=given)
        for one, place in zip(answer.data, places, strict=True):
            np.testing.assert_allclose(one.embedding, expected["default"][place], rtol=0, atol=1e-6)


def test_dimensions_and_extensions(client: OpenAI, expected: dict[str, Any]) -> None:
    short = client.embeddings.create(model=MODEL_NAME, input=TEXTS, dimensions=7)
    for one, vector in zip(short.data, expected["short"], strict=True):
        np.testing.assert_allclose(one.embedding, vector, rtol=0, atol=1e-6)
    extra = {"pooling": "mean", "normalize": False, "priority": 1}
    for one, vector in zip(
        client.embeddings.create(model=MODEL_NAME, input=TEXTS, extra_body=extra).data, expected["mean"], strict=True
    ):
        np.testing.assert_allclose(one.embedding, vector, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [""]}, "the prompt is empty"),
        ({"input": ["a", ""]}, "prompt 1: the prompt is empty"),
        ({"input": [1, 100_000]}, "prompt holds 100000, which is not a token id"),
        ({"input": [1, "a"]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 4096}, "dimensions 4096 is above the 48 of this model's vectors"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (
            {"input": "a", "pooling": "most"},
            "pooling must be last, cls, mean, max, mean_sqrt_len or weighted_mean, not",
        ),
        ({"input": "a", "stream": True}, "unknown field 'stream'"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "model": "other"}, "there is no model 'other' here"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(server: RunningServer, asked: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json=asked, timeout=60)
    assert answer.status_code == (404 if "model" in asked else 400)
    told = answer.json()["error"]["message"]
    assert message in told and "\n" not in told


def test_the_client_raises_what_is_told(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="above the 48"):
        client.embeddings.create(model=MODEL_NAME, input="a", dimensions=100)


def test_nothing_stays(server: RunningServer, client: OpenAI) -> None:
    before = server.metric("open_completions")
    client.embeddings.create(model=MODEL_NAME, input=["text"] * 30)
    server.wait_until_idle()
    assert server.metric("open_completions") == before == 0
