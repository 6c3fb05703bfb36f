"""Clients of others that ask for objects: LangChain and instructor (``make test-clients``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests import tiny_models
from tests.server.conftest import MODEL_NAME, RunningServer, start_server

pytestmark = pytest.mark.clients
QUESTION = "Is it true?"


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    level: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("tiny"))
    running = start_server(folder)
    yield running
    running.stop()


def test_langchain_gives_an_object(server: RunningServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    client = langchain_openai.ChatOpenAI(
        model=MODEL_NAME, base_url=f"{server.url}/v1", api_key="unused", max_tokens=300
    )
    found = client.with_structured_output(Verdict, method="json_schema").invoke(QUESTION)
    assert isinstance(found, Verdict)


def test_instructor_gives_an_object(server: RunningServer) -> None:
    instructor = pytest.importorskip("instructor")
    openai_client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    client = instructor.from_openai(openai_client, mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": QUESTION}]
    found = client.chat.completions.create(
        model=MODEL_NAME, response_model=Verdict, messages=messages, max_tokens=300, max_retries=0
    )
    assert isinstance(found, Verdict)
