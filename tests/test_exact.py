"""``LLM(exact=True)`` on a CPU: one request, one text, to the bit, in float32, whatever goes on beside it.

Everything that a request is given is compared: tokens and the bits of all log probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lossless_fuzz import describe_difference, run_fuzz
from lossless_fuzz_engines import EXACT_DRAFTERS
from lossless_fuzz_runs import Settings, Tally
from slipstream import LLM, SamplingParams
from slipstream.kernels import native
from slipstream.models.decoder import Decoder
from slipstream.output import RequestOutput
from tests import tiny_models

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C compiler here")
PROMPTS = ["the same text " * 6, "another one", "x" * 40, "the same text " * 6 + "and more"]
PARAMS = [
    SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    for i in range(len(PROMPTS))
]
# Keys are not found in the cache where a request asks for a prompt's log probabilities.
FROM_CACHE = [
    SamplingParams(temperature=0.8, seed=i, max_tokens=12, ignore_eos=True, logprobs=20) for i in range(len(PROMPTS))
]
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"long_prefill_token_threshold": 9, "steps_in_flight": 3},
    "preempted": {"num_gpu_blocks_override": 13, "block_size": 8, "steps_in_flight": 2},
    "drafts": {"speculate": "ngram", "k": 4, "long_prefill_token_threshold": 11},
}


WIDE = "qwen3-wide-heads-bias"  # for whose prompts the C kernels have a way of their own


@pytest.fixture(scope="module", params=["llama", WIDE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build(request.param), tmp_path_factory.mktemp("tiny"))


def open_llm(folder: Path, **options: Any) -> LLM:
    given = {"exact": True, "max_model_len": 128, "max_num_seqs": 4, "speculate": "none", **options}
    return LLM(str(folder), device="cpu", **given)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[list[list[Any]]]:
    """One request at a time, each computed at once, by an engine that remembers nothing."""
    with open_llm(folder, enable_prefix_caching=False) as llm:
        yield [numbers_of(llm.generate(PROMPTS[i], one[i])[0] for i in range(4)) for one in (PARAMS, FROM_CACHE)]


def numbers_of(outputs: Iterator[RequestOutput] | list[RequestOutput]) -> list[Any]:
    return [(one.token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_bits(folder: Path, alone: list[list[Any]], name: str) -> None:
    with open_llm(folder, **SETTINGS[name]) as llm:
        assert numbers_of(llm.generate(PROMPTS, PARAMS)) == alone[0]
        for _ in range(2):  # the second time with keys from the cache
            assert numbers_of(llm.generate(PROMPTS, FROM_CACHE)) == alone[1]
        assert llm.stats.num_cached_tokens > 0
        assert name != "preempted" or llm.stats.num_preemptions > 0
        assert name != "drafts" or llm.stats.num_accepted_tokens > 0


def test_any_number_of_threads(folder: Path, alone: list[list[Any]]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with open_llm(folder) as llm:
            assert numbers_of(llm.generate(PROMPTS, PARAMS)) == alone[0]
    finally:
        torch.set_num_threads(threads)


def test_prompts_by_another_kernel_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exact attention, a prompt's tokens are computed several at a time, and rounded in another way."""
    folder = tiny_models.save(tiny_models.build(WIDE), tmp_path)

    def forget_attention(self: Decoder) -> None:
        keep_exact(self)
        assert self.stack is not None
        self.stack.alone = False

    keep_exact = Decoder.keep_exact
    monkeypatch.setattr(Decoder, "keep_exact", forget_attention)
    found = []
    for threshold in (None, 5):
        with open_llm(folder, long_prefill_token_threshold=threshold) as llm:
            found.append(numbers_of(llm.generate(PROMPTS, PARAMS)))
    assert found[0] != found[1]


def test_random_requests_with_every_drafter() -> None:
    """Chunks, preemption, aborts, steps in flight and every sampling parameter, against the request by itself."""
    outcome = run_fuzz(Settings(num_requests=18, seed=3, per_engine=3, drafters=EXACT_DRAFTERS, exact=True))
    assert [describe_difference(difference, "") for difference in outcome.differences] == []
    total = Tally()
    for tally in outcome.tallies.values():
        total += tally
    assert total.num_requests == 18 and total.num_accepted > 20 and total.num_logprobs > 300
    assert total.num_rounded == 0
