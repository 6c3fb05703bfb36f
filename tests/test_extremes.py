"""No request ends the engine, whatever is in it: it is answered, or refused in one line, and the next is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slipstream import LLM, AsyncLLM, RequestError, SamplingParams
from tests import tiny_models
from tests.extremes import ANY, FIELDS, PROMPTS

SHORT = {"max_model_len": 40, "max_num_seqs": 4}
Ask = Callable[[Any, dict[str, Any], Any, Any], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["LLM", "LLM in a process of its own", "AsyncLLM"])
def ask(folder: Path, request: pytest.FixtureRequest) -> Iterator[Ask]:
    """Sends one request, and waits for its end."""
    if request.param == "AsyncLLM":
        engine = AsyncLLM(str(folder), **SHORT)

        async def one(prompt: Any, params: dict[str, Any], priority: Any, request_id: Any) -> None:
            own = SamplingParams.from_dict(params)
            async for _ in engine.generate(prompt, own, priority=priority, request_id=request_id):
                pass

        yield lambda *given: asyncio.run(one(*given))
        engine.close()
        return
    with LLM(str(folder), own_process=request.param != "LLM", **SHORT) as llm:
        yield lambda prompt, params, priority, _: llm.generate(
            prompt, SamplingParams.from_dict(params), priority=priority
        )
        assert not llm.client.output.submissions and not llm.client.output.streams, "a slot was leaked"


@given(
    params=st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=3),
    prompt=st.one_of(st.just([1, 2, 3]), st.sampled_from(PROMPTS)),
    priority=st.one_of(st.just(0), ANY),
    request_id=st.one_of(st.none(), ANY),
)
@example(params={"min_tokens": 2**31 - 1}, prompt=[1, 2], priority=0, request_id=None)
@example(params={"max_tokens": 2**31 - 1}, prompt=[1, 2], priority=0, request_id=None)
@example(params={"max_tokens": 2**63, "min_tokens": 2**63}, prompt=[1, 2], priority=0, request_id=None)
@example(params={}, prompt=[True, 5], priority=0, request_id=None)
@example(params={}, prompt=[1, 2], priority=2**64, request_id=None)
@example(params={"stop": "\ud800"}, prompt=[1, 2], priority=0, request_id=None)
@example(params={"ignore_eos": 1}, prompt=[1, 2], priority=0, request_id=None)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_extremes_of_every_field(ask: Ask, params: dict[str, Any], prompt: Any, priority: Any, request_id: Any) -> None:
    try:
        ask(prompt, params, priority, request_id)
    except RequestError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
    ask([1, 2, 3], {"max_tokens": 1}, 0, None)
