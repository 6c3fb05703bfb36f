"""Reranking, scores and classes over HTTP: the numbers of ``LLM``, in the shapes that clients read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.llm import LLM
from tests.models import tiny_encoders

from .conftest import RunningServer, start_server

QUERY, DOCUMENTS = "what is it", ["one thing", "another", "something else"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoders.save(tiny_encoders.build("bert-cross-encoder"), tmp_path_factory.mktemp("cross"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    with LLM(str(folder)) as llm:
        return {
            "scores": [output.score for output in llm.score(QUERY, DOCUMENTS)],
            "order": [output.index for output in llm.rerank(QUERY, DOCUMENTS)],
            "count": sum(output.num_prompt_tokens for output in llm.score(QUERY, DOCUMENTS)),
            "probs": [output.probs.tolist() for output in llm.classify(DOCUMENTS)],
        }


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[RunningServer]:
    running = start_server(folder)
    yield running
    running.stop()


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(reranker: RunningServer, expected: dict[str, Any], path: str) -> None:
    answer = post(reranker, path, query=QUERY, documents=DOCUMENTS).json()
    assert [one["index"] for one in answer["results"]] == expected["order"]
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(expected["scores"][one["index"]], abs=1e-6)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert answer["usage"] == {"prompt_tokens": expected["count"], "total_tokens": expected["count"]}
    fewer = {"top_n": 1, "return_documents": False, "documents": [{"text": text} for text in DOCUMENTS]}
    (best,) = post(reranker, path, query=QUERY, **fewer).json()["results"]
    assert best.keys() == {"index", "relevance_score"} and best["index"] == expected["order"][0]


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_score(reranker: RunningServer, expected: dict[str, Any], names: tuple[str, str]) -> None:
    for first in (QUERY, [QUERY] * len(DOCUMENTS)):
        answer = post(reranker, "/score", **{names[0]: first, names[1]: DOCUMENTS}).json()
        assert answer["object"] == "list"
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected["scores"], abs=1e-6)
    assert len(post(reranker, "/score", **{names[0]: QUERY, names[1]: "x"}).json()["data"]) == 1


def test_classify(reranker: RunningServer, expected: dict[str, Any]) -> None:
    data = post(reranker, "/classify", input=DOCUMENTS).json()["data"]
    for one, probs in zip(data, expected["probs"], strict=True):
        assert one["probs"] == pytest.approx(probs, abs=1e-6)
        assert (one["label"], one["num_classes"]) == ("LABEL_0", 1)


def test_a_model_that_generates_ranks_by_cosine(server: RunningServer, model_folder: Path) -> None:
    with LLM(str(model_folder)) as llm:
        expected = [output.score for output in llm.score(QUERY, DOCUMENTS)]
    answer = post(server, "/rerank", query=QUERY, documents=DOCUMENTS).json()
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["x" * 300]}, "or set truncate_prompt_tokens"),
        ("/rerank", {"query": "a", "documents": ["x"], "instruction": "do"}, "without an instruction"),
        ("/score", {"text_1": "a"}, "give either text_2 or documents"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "give either text_1 or queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "2 texts cannot be paired with 3"),
        ("/v1/embeddings", {"input": "a"}, "this checkpoint scores texts and makes no vectors"),
        ("/v1/completions", {"prompt": "a"}, "cannot generate"),
        ("/classify", {"input": "a", "model": "other"}, "there is no model 'other' here"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(reranker: RunningServer, path: str, body: dict[str, Any], message: str) -> None:
    answer = post(reranker, path, **body)
    assert answer.status_code == (404 if "model" in body else 400)
    told = answer.json()["error"]["message"]
    assert message in told and "\n" not in told


def test_long_texts_are_cut_where_that_is_asked_for(reranker: RunningServer) -> None:
    answer = post(reranker, "/rerank", query="a", documents=["x" * 300], truncate_prompt_tokens=-1)
    assert answer.json()["usage"]["prompt_tokens"] == 130
    assert post(reranker, "/classify", input="x" * 300, truncate_prompt_tokens=9).json()["usage"]["prompt_tokens"] == 9
    reranker.wait_until_idle()
