"""Speculation through the front door: options in, figures out, the same text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, AsyncLLM, ConfigError, SamplingParams
from slipstream.output import SYNTHETIC_NOTICE, DraftStats, RequestOutput
from tests import tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = ["one two one two one two", "hello hello hello", "x"]
VLLM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[RequestOutput]:
    with LLM(str(folder), dtype="float64", max_num_seqs=4) as llm:
        return llm.generate(PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float64", max_num_seqs=4, speculate="ngram", k=4) as llm:
        yield llm


def stats_of(output: RequestOutput) -> DraftStats:
    assert output.speculation is not None
    return output.speculation


@pytest.mark.parametrize("options", [{"speculate": "ngram", "k": 4}, VLLM])
def test_both_spellings_draft_and_change_no_token(
    folder: Path, plain: list[RequestOutput], options: dict[str, Any]
) -> None:
    assert all(output.speculation is None for output in plain)
    with LLM(str(folder), dtype="float64", max_num_seqs=4, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        counted = llm.stats
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert [o.text for o in outputs] == [o.text for o in plain]
    figures = [stats_of(output) for output in outputs]
    assert figures[0].num_drafts > 0
    for one in figures:
        assert one.num_accepted <= one.num_drafts
        assert len(one.num_drafts_at) <= 4
        assert 1.0 <= one.mean_length <= 5.0
        assert not one.is_synthetic
    # The engine's own counts are the sum of the requests'.
    assert counted.num_draft_steps == sum(one.num_steps for one in figures)
    assert counted.num_draft_tokens == sum(one.num_drafts for one in figures) == sum(counted.num_draft_tokens_at)
    assert counted.num_accepted_tokens == sum(one.num_accepted for one in figures)


def test_every_token_is_accepted_or_the_targets_own(llm: LLM) -> None:
    output = llm.generate(PROMPTS[:1], GREEDY)[0]
    figures = stats_of(output)
    # The last step may accept drafts up to the limit and so give no token of the target's own.
    assert figures.num_accepted <= len(output.token_ids) - 1
    assert figures.num_steps <= len(output.token_ids) - figures.num_accepted


def test_switches_of_single_requests(llm: LLM, plain: list[RequestOutput]) -> None:
    params = [replace(GREEDY, speculate=False), replace(GREEDY, max_k=1), replace(GREEDY, max_k=99)]
    outputs = llm.generate(PROMPTS[:1] * 3, params)
    assert all(output.token_ids == plain[0].token_ids for output in outputs)
    off, one, all_of_them = (stats_of(output) for output in outputs)
    assert (off.num_steps, off.num_drafts) == (0, 0)
    assert one.num_drafts > 0 and len(one.num_drafts_at) == 1
    assert len(all_of_them.num_drafts_at) <= 4


def test_a_stream_carries_figures_that_grow(llm: LLM, plain: list[RequestOutput]) -> None:
    outputs = list(llm.stream(PROMPTS[0], GREEDY))
    assert "".join(output.delta_text for output in outputs) == plain[0].text
    counts = [stats_of(output).num_drafts for output in outputs]
    assert counts == sorted(counts) and counts[-1] > 0


def test_stop_strings_cut_where_they_would_without_drafts(llm: LLM, folder: Path, plain: list[RequestOutput]) -> None:
    params = replace(GREEDY, stop=(plain[0].text[20:22],), logprobs=1)
    with LLM(str(folder), dtype="float64", max_num_seqs=4) as other:
        expected = other.generate(PROMPTS[:1], params)[0].outputs[0]
    found = llm.generate(PROMPTS[:1], params)[0].outputs[0]
    assert (found.text, found.token_ids, found.stop_reason) == (expected.text, expected.token_ids, expected.stop_reason)
    assert found.logprobs is not None and len(found.logprobs) == len(found.token_ids)


def test_asyncio(folder: Path, plain: list[RequestOutput]) -> None:
    async def last_of(engine: AsyncLLM, prompt: str) -> RequestOutput:
        return [output async for output in engine.generate(prompt, GREEDY)][-1]

    async def everything() -> list[RequestOutput]:
        async with AsyncLLM(str(folder), dtype="float64", max_num_seqs=4, **VLLM) as engine:
            return await asyncio.gather(*(last_of(engine, prompt) for prompt in PROMPTS))

    outputs = asyncio.run(everything())
    assert [o.text for o in outputs] == [o.text for o in plain]
    assert stats_of(outputs[0]).num_drafts > 0


def test_a_model_that_drafts_for_itself_is_always_right(folder: Path, plain: list[RequestOutput]) -> None:
    options = {"speculate": "draft_model", "draft_model": str(folder), "k": 2}
    with LLM(str(folder), dtype="float64", max_num_seqs=4, **options) as llm:
        output = llm.generate(PROMPTS[:1], GREEDY)[0]
    assert output.token_ids == plain[0].token_ids
    assert stats_of(output).acceptance_at == pytest.approx([1.0, 1.0], abs=0.05)


def test_synthetic_acceptance_is_said_at_the_start_and_in_every_output(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates = {"method": "ngram", "num_speculative_tokens": 2, "verify": "synthetic", "acceptance_rates": [1.0, 1.0]}
    with (
        caplog.at_level(logging.WARNING, logger="slipstream"),
        LLM(str(folder), speculative_config=rates, max_num_seqs=4) as llm,
    ):
        output = llm.generate(PROMPTS[:1], GREEDY)[0]
    assert f"synthetic acceptance: {SYNTHETIC_NOTICE}" in caplog.text
    assert stats_of(output).is_synthetic
    assert stats_of(output).as_dict()["synthetic"] == SYNTHETIC_NOTICE


@pytest.mark.parametrize("front", [LLM, AsyncLLM])
@pytest.mark.parametrize("own_process", [False, True])
def test_wrong_speculation_is_refused_before_a_model_is_looked_for(
    front: type[LLM] | type[AsyncLLM], own_process: bool, tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"unknown method 'ngrm' in speculate; did you mean 'ngram'\?"):
        front(nowhere, own_process=own_process, speculate="ngrm")
    with pytest.raises(ConfigError, match="k must be an integer from 1 to 16, not 0"):
        front(nowhere, own_process=own_process, speculate="ngram", k=0)
    with pytest.raises(ConfigError, match="unknown key 'num_speculative_token' in speculative_config; did you mean"):
        front(nowhere, own_process=own_process, speculative_config={"method": "ngram", "num_speculative_token": 4})
    with pytest.raises(ConfigError, match="unknown option 'speculatve'; did you mean 'speculate'"):
        front(nowhere, own_process=own_process, speculatve="ngram")
