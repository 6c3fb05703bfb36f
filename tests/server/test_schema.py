"""Requests made from the server's own schema: nothing breaks it, and every answer is what the schema says."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from .conftest import RunningServer

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/audio/translations"),
    ("POST", "/rerank"),
    ("POST", "/score"),
    ("POST", "/classify"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def schema(server: RunningServer) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


# A GET without a body has nothing to get wrong.
CASES = [(*route, mode) for route in ROUTES for mode in GenerationMode if mode.is_positive or route[0] == "POST"]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_matches_the_schema(
    schema: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    operation = schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE and "completions" in path:
            case.body["max_tokens"] = 3  # what is tested is the answer's shape, not the model's endurance
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


def test_every_route_is_tested(schema: schemathesis.BaseSchema) -> None:
    found = {(r.ok().method.upper(), r.ok().path) for r in schema.get_all_operations()}
    assert found == set(ROUTES)


def test_the_server_is_well_afterwards(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    server.wait_until_idle()
