"""A model's own state is an object that the model brings: columns of rows, inputs of each step, a word on the cache.

A toy one lives in this folder. What it generates is what ``transformers`` gives for the shifted embeddings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from slipstream import LLM, RequestError, SamplingParams, parameters
from slipstream.models import registry
from slipstream.parameters import register_parameter
from tests import tiny_models
from tests.drill import toy_state
from tests.drill.toy_state import NAME, NUM_SHIFTS, SHIFT, Shifted, ShiftState

# Repeating prompts have n-gram drafts. Two begin with the same two pages.
PROMPTS = [[7, 9, 7, 9, 7, 9], [*range(40, 75)], [*range(40, 72), 3, 200], [5] * 19, [11]]
LENGTH = 16


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "registered", {})
    monkeypatch.setattr(parameters, "_extra", {})
    registry.register(NAME, Shifted)
    register_parameter(SHIFT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("shifted"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [NAME]}))
    return folder


def cases() -> list[tuple[list[int], int]]:
    return [(prompt, shift) for prompt in PROMPTS for shift in range(NUM_SHIFTS)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Greedy, every token from the whole text, by ``transformers``."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    table, found = toy_state.biases(model.config.hidden_size), []
    for prompt, shift in cases():
        text = list(prompt)
        for _ in range(LENGTH):
            with torch.no_grad():
                embeddings = model.get_input_embeddings()(torch.tensor([text])) + table[shift]
                text.append(int(model(inputs_embeds=embeddings).logits[0, -1].argmax()))
        found.append(text[len(prompt) :])
    return found


def params(shift: int) -> SamplingParams:
    extra = {"shift": shift} if shift else {}
    return SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, extra=extra)


def generate(folder: Path, **options: Any) -> list[list[int]]:
    """All cases twice, the second time with pages of the first."""
    given = {"dtype": "float64", "max_num_seqs": 4, "max_model_len": 128, **options}
    with LLM(str(folder), **given) as llm:
        prompts, shifts = zip(*cases(), strict=True)
        outputs = llm.generate(list(prompts), [params(shift) for shift in shifts])
        again = llm.generate(list(prompts), [params(shift) for shift in shifts])
        assert any(o.num_cached_tokens for o in again), "pages of equal shifts are shared"
        assert llm.stats.num_sync_violations == 0
    return [output.token_ids for output in (*outputs, *again)]


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
SIM: dict[str, Any] = {"device": "sim", "steps_in_flight": 3, "cudagraph_capture_sizes": (4, 8, 32)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 5, **DRAFTS},
        {**SIM, "cudagraph_mode": "full", **DRAFTS},
        {**SIM, "cudagraph_mode": "piecewise", "long_prefill_token_threshold": 5},
    ],
    ids=str,
)
def test_each_request_has_its_own_shift(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    assert generate(folder, **options) == expected * 2
    assert len({tuple(tokens) for tokens in expected[3:6]}) == NUM_SHIFTS, "shifts that change nothing prove nothing"


def test_without_a_key_pages_of_other_shifts_are_found(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the cache is told of tokens alone."""
    monkeypatch.setattr(ShiftState, "cache_key", lambda _self, _request: b"")
    assert generate(folder) != expected * 2


def test_a_shift_of_another_row_is_found(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the inputs are gathered by place in the batch."""
    inner = ShiftState.prepare
    by_place = lambda requests: requests._replace(batch_rows=torch.arange(len(requests.batch_rows)).int())  # noqa: E731
    monkeypatch.setattr(ShiftState, "prepare", lambda self, requests: inner(self, by_place(requests)))
    assert generate(folder) != expected * 2


def test_vectors_are_shifted_too(folder: Path) -> None:
    """The state knows of requests and steps, not of what heads make of them."""
    with LLM(str(folder), dtype="float64", max_num_seqs=2, max_model_len=128) as llm:
        (plain,) = llm.embed([PROMPTS[1]])
        assert plain.error is None
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval().model
        with torch.no_grad():
            hidden = model(torch.tensor([PROMPTS[1]])).last_hidden_state[0, -1]
        np.testing.assert_allclose(plain.embedding, (hidden / hidden.norm()).numpy(), rtol=0, atol=1e-6)


def test_values_are_checked(folder: Path) -> None:
    with pytest.raises(RequestError, match="shift must be an integer of at least 0 and at most 2, not 3"):
        params(3)
    plain = tiny_models.save(tiny_models.build("llama"), folder.parent / "plain")
    with LLM(str(plain), max_num_seqs=1, max_model_len=64) as llm:
        output = llm.generate([1, 2], params(1))[0]
        assert output.error is not None and "this engine has no sampling parameter 'shift'" in output.error


def test_the_host_is_told_of_every_step(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=1, max_model_len=64) as llm:
        llm.generate([1, 2], params(1))
        state = llm.client.running.core.runner.model_state  # type: ignore[union-attr, attr-defined]
        assert state.num_begun == llm.stats.num_steps > 0


def test_the_package_knows_none_of_this() -> None:
    root = Path(registry.__file__).parent.parent
    for path in root.rglob("*.py"):
        assert "ShiftState" not in path.read_text() and NAME not in path.read_text(), path
