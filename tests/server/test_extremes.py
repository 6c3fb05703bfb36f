"""The same over HTTP: no body ends the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slipstream.server.protocol import ChatCompletionRequest, CompletionRequest
from tests.extremes import JSON
from tests.server.conftest import RunningServer, start_server

FIELDS = sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields} - {"prompt", "messages"})


@pytest.fixture(scope="module")
def client(model_folder: Path) -> Iterator[httpx.Client]:
    running: RunningServer = start_server(model_folder, "--max-model-len", "40")
    with httpx.Client(base_url=running.url, timeout=60) as made:
        yield made
    assert running.metric("engine_restarts_total") == 0
    running.wait_until_idle()
    running.stop()


@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    prompt=st.one_of(st.just([1, 2, 3]), JSON),
    is_chat=st.booleans(),
)
@example(fields={"min_tokens": 2**31 - 1}, prompt=[1, 2], is_chat=False)
@example(fields={"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1}, prompt=[1, 2], is_chat=False)
@example(fields={}, prompt=[True, 5], is_chat=False)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_extremes_of_every_field(client: httpx.Client, fields: dict[str, Any], prompt: Any, is_chat: bool) -> None:
    subject = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    # Written by hand: httpx would refuse NaN, and a client in another language may not.
    body = json.dumps({**subject, **fields})
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (body[:300], answer.text[:300])
    alive = client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 1})
    assert alive.status_code == 200, (body[:300], alive.text)
