"""Clients of others against the server: LangChain's embeddings, Cohere's reranking (``make test-clients``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from slipstream.llm import LLM
from tests.models import tiny_encoders
from tests.server.conftest import MODEL_NAME, RunningServer, start_server

pytestmark = pytest.mark.clients
QUERY, DOCUMENTS = "what is it", ["one thing", "another", "something else"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = ("bert", "bert-cross-encoder")
    return {kind: tiny_encoders.save(tiny_encoders.build(kind), tmp_path_factory.mktemp(kind)) for kind in kinds}


@pytest.fixture(scope="module", params=["bert", "bert-cross-encoder"])
def running(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[tuple[str, RunningServer]]:
    server = start_server(folders[request.param])
    yield request.param, server
    server.stop()


def test_langchain_embeds(running: tuple[str, RunningServer], folders: dict[str, Path]) -> None:
    kind, server = running
    if kind != "bert":
        pytest.skip("makes no vectors")
    langchain_openai = pytest.importorskip("langchain_openai")
    with LLM(str(folders[kind])) as llm:
        expected = [output.embedding for output in llm.embed(DOCUMENTS)]
    settings = {"model": MODEL_NAME, "base_url": f"{server.url}/v1", "api_key": "unused"}
    with httpx.Client(timeout=60) as http:  # the clients leave connections of their own open
        client = langchain_openai.OpenAIEmbeddings(**settings, check_embedding_ctx_length=False, http_client=http)
        np.testing.assert_allclose(client.embed_documents(DOCUMENTS), expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(client.embed_query(DOCUMENTS[0]), expected[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("version", [1, 2])
def test_cohere_reranks(running: tuple[str, RunningServer], folders: dict[str, Path], version: int) -> None:
    kind, server = running
    cohere = pytest.importorskip("cohere")
    make = cohere.Client if version == 1 else cohere.ClientV2
    with LLM(str(folders[kind])) as llm:
        expected = llm.rerank(QUERY, DOCUMENTS, top_n=2)
    with httpx.Client(timeout=60) as http:
        client = make(api_key="unused", base_url=server.url, httpx_client=http)
        found = client.rerank(model=MODEL_NAME, query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [one.index for one in found.results] == [one.index for one in expected]
    for one, own in zip(found.results, expected, strict=True):
        assert one.relevance_score == pytest.approx(own.score, abs=1e-5)
