"""Pooled requests beside others: vectors are those of ``transformers``, and tokens what they are without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.engine.core import EngineCore
from slipstream.pooling import KIND_NAMES, PoolingParams
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from tests import tiny_models
from tests.engine.drive import make_request

Vector = npt.NDArray[np.floating]
# Two begin alike for more than a page; one is a single token.
TEXTS = [[7, 9, 7, 9, 7, 9], [*range(40, 75)], [5] * 19, [*range(40, 72), 3, 200], [11], [*range(30)] * 3]
LENGTH = 20
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
SIM: dict[str, Any] = {"device": "sim", "steps_in_flight": 3, "cudagraph_capture_sizes": (4, 8, 32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("qwen3"), tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[int, str], Vector]:
    """By text and kind, not normalised, by ``transformers`` alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval().model
    found = {}
    with torch.no_grad():
        for i, text in enumerate(TEXTS):
            hidden = model(torch.tensor([text])).last_hidden_state[0]
            numbers, root = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype), len(hidden) ** 0.5
            vectors = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0), "max": hidden.max(0).values}
            weighted = numbers @ hidden / numbers.sum()
            vectors |= {"mean_sqrt_len": hidden.sum(0) / root, "weighted_mean": weighted}
            found |= {(i, kind): vector.numpy() for kind, vector in vectors.items()}
    return found


def make_pooled(request_id: str, text: Iterable[int], kind: str) -> Request:
    text, params = tuple(text), SamplingParams(temperature=0.0, seed=0).with_defaults(SamplingParams())
    return Request(request_id, text, params, (), len(text), pooling=PoolingParams(kind, normalize=False))


def build(folder: Path, **options: Any) -> Engine:
    given = {"model": str(folder), "dtype": "float64", "max_num_seqs": 4, "max_model_len": 128, **options}
    return build_engine(EngineOptions.from_dict(given))


def drive(core: EngineCore, requests: Iterable[Request]) -> tuple[dict[str, Vector], dict[str, list[int]]]:
    """Vectors and tokens by request id."""
    vectors: dict[str, Vector] = {}
    tokens: dict[str, list[int]] = {}
    pooled = {}
    for request in requests:
        core.add(request)
        if request.pooling is not None:
            pooled[request.request_id] = request.pooling
    while core.has_work:
        for update in core.step():
            assert update.error is None
            if update.request_id in pooled:
                assert update.vector is not None and update.finish_reason is not None and not update.token_ids
                assert update.request_id not in vectors, "two vectors of one request"
                vectors[update.request_id] = update.vector.finish(pooled[update.request_id])
            else:
                assert update.vector is None
                tokens.setdefault(update.request_id, []).extend(update.token_ids)
    core.scheduler.check_idle()
    return vectors, tokens


def both_kinds() -> list[Request]:
    """One that generates between any two that are pooled."""
    requests = []
    for i, text in enumerate(TEXTS):
        for kind in ("last", "cls", "mean"):
            requests.append(make_pooled(f"{i} {kind}", text, kind))
            if kind != "cls":
                requests.append(make_request(f"{i} after {kind}", text, LENGTH))
    others = [kind for kind in KIND_NAMES if kind not in ("last", "cls", "mean")]
    return requests + [make_pooled(f"{i} {kind}", text, kind) for i, text in enumerate(TEXTS) for kind in others]


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[dict[str, Vector], dict[str, list[int]]]:
    """Each request by itself, its prompt in one piece."""
    engine = build(folder, max_num_seqs=1, enable_prefix_caching=False)
    vectors, tokens = {}, {}
    for request in both_kinds():
        own_vectors, own_tokens = drive(engine.core, [request])
        vectors |= own_vectors
        tokens |= own_tokens
    return vectors, tokens


def test_vectors_are_those_of_transformers(
    alone: tuple[dict[str, Vector], dict[str, list[int]]], expected: dict[tuple[int, str], Vector]
) -> None:
    assert len(alone[0]) == len(expected) == len(TEXTS) * len(KIND_NAMES)
    for (i, kind), vector in expected.items():
        assert alone[0][f"{i} {kind}"].dtype == np.float64
        # Its norms are computed in float32, whatever the model's type.
        np.testing.assert_allclose(alone[0][f"{i} {kind}"], vector, rtol=2e-6, atol=2e-6, err_msg=f"{i} {kind}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 5, "steps_in_flight": 2},
        {"num_gpu_blocks_override": 9, "long_prefill_token_threshold": 7},  # too few for all: requests are preempted
        {"max_num_seqs": 16, "max_num_batched_tokens": 256, **DRAFTS},
        {"long_prefill_token_threshold": 3, "max_num_batched_tokens": 19, **DRAFTS},
        {**SIM, "cudagraph_mode": "none", "long_prefill_token_threshold": 5},
        {**SIM, "cudagraph_mode": "full", "long_prefill_token_threshold": 5, **DRAFTS},
        {**SIM, "cudagraph_mode": "piecewise", "num_gpu_blocks_override": 9},
    ],
    ids=str,
)
def test_both_kinds_share_steps(
    folder: Path, alone: tuple[dict[str, Vector], dict[str, list[int]]], options: dict[str, Any]
) -> None:
    engine = build(folder, **options)
    vectors, tokens = drive(engine.core, both_kinds())
    assert tokens == alone[1]
    assert vectors.keys() == alone[0].keys()
    for name, vector in vectors.items():
        np.testing.assert_allclose(vector, alone[0][name], rtol=1e-12, atol=1e-12, err_msg=name)
    stats = engine.core.stats
    assert stats.num_sync_violations == 0
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    if "speculative_config" in options:
        assert stats.num_accepted_tokens > 0


def test_last_tokens_use_the_prefix_cache_and_others_do_not(
    folder: Path, alone: tuple[dict[str, Vector], dict[str, list[int]]]
) -> None:
    core = build(folder).core
    for kind in KIND_NAMES:
        requests = [make_pooled(f"{i} {kind}", text, kind) for i, text in enumerate(TEXTS)]
        drive(core, requests)
        before = core.stats.num_cached_tokens
        vectors, _ = drive(core, requests)
        assert (core.stats.num_cached_tokens > before) == (kind == "last"), kind
        for name, vector in vectors.items():
            np.testing.assert_allclose(vector, alone[0][name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_pages_of_a_pooled_text_serve_one_that_generates(
    folder: Path, alone: tuple[dict[str, Vector], dict[str, list[int]]]
) -> None:
    core = build(folder).core
    drive(core, [make_pooled("mean", TEXTS[5], "mean")])
    _, tokens = drive(core, [make_request("5 after last", TEXTS[5], LENGTH)])
    assert core.stats.num_cached_tokens > 0
    assert tokens["5 after last"] == alone[1]["5 after last"]


def test_a_text_may_fill_the_context(folder: Path) -> None:
    text = [i * 7 % 250 for i in range(64)]
    core = build(folder, max_model_len=64, long_prefill_token_threshold=9).core
    whole = build(folder, max_model_len=128).core
    for kind in KIND_NAMES:
        (found,), (expected,) = (drive(c, [make_pooled("r", text, kind)])[0].values() for c in (core, whole))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_an_aborted_text_leaves_nothing(
    folder: Path, alone: tuple[dict[str, Vector], dict[str, list[int]]], num_steps: int
) -> None:
    """With steps in flight, in the middle of its chunks; its row serves the next one."""
    core = build(folder, max_num_seqs=1, long_prefill_token_threshold=4, steps_in_flight=3).core
    core.add(make_pooled("gone", [*range(100, 130)], "mean"))
    for _ in range(num_steps):
        assert not [update for update in core.step() if update.vector is not None]
    assert core.finish("gone")
    vectors, _ = drive(core, [make_pooled("1 mean", TEXTS[1], "mean")])
    np.testing.assert_allclose(vectors["1 mean"], alone[0]["1 mean"], rtol=1e-12, atol=1e-12)


def test_steps_of_pooled_texts_alone_make_no_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = build(folder).core
    made: list[int] = []
    _count_calls(monkeypatch, core, made)
    drive(core, [make_pooled("a", TEXTS[1], "last"), make_pooled("b", TEXTS[2], "mean")])
    assert not made
    drive(core, [make_pooled("c", TEXTS[1], "last"), make_request("d", TEXTS[2], 2)])
    assert made


def _count_calls(monkeypatch: pytest.MonkeyPatch, core: EngineCore, made: list[int]) -> None:
    head: Any = core.runner.head
    inner: Callable[..., Any] = head.generate.project
    monkeypatch.setattr(head.generate, "project", lambda *args: made.append(1) or inner(*args))
