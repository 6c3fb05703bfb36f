"""Drafts for a model with an encoder change no token, whoever proposes them, and a right drafter is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.errors import ConfigError
from tests import tiny_models, tiny_whisper

PROMPTS = tiny_whisper.make_prompts(4)
LENGTH = 40
SIM: dict[str, Any] = {"device": "sim", "steps_in_flight": 3, "cudagraph_capture_sizes": (4, 8, 16)}
FEW_PAGES = {"num_gpu_blocks_override": 18}
PLACES: list[dict[str, Any]] = [
    {},
    FEW_PAGES,
    {**SIM, "cudagraph_mode": "full"},
    {**SIM, **FEW_PAGES, "cudagraph_mode": "piecewise"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last layer leaves its input as it is, so that the first two are always right."""
    model = tiny_whisper.build()
    last = model.model.decoder.layers[-1]
    for product in (last.self_attn.out_proj, last.encoder_attn.out_proj, last.fc2):
        product.weight.data.zero_()
        product.bias.data.zero_()
    return tiny_whisper.save(model, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = tiny_whisper.build(1, d_model=32, encoder_layers=1, decoder_layers=2, **heads)
    return tiny_whisper.save(model, tmp_path_factory.mktemp("draft"))


def generate(folder: Path, temperature: float, **options: Any) -> tuple[list[list[int]], int, int]:
    """Tokens, and how many drafts were checked and accepted."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=LENGTH, ignore_eos=True, seed=i) for i in range(len(PROMPTS))
    ]
    with LLM(str(folder), **{"dtype": "float64", "max_num_seqs": 3, **options}) as llm:
        outputs = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS, params)]
        assert not [output.error for output in outputs if output.error is not None]
        assert bool(llm.stats.num_preemptions) == ("num_gpu_blocks_override" in options)
        drafts = llm.stats.drafts
    return [output.token_ids for output in outputs], sum(drafts.num_drafts_at), sum(drafts.num_accepted_at)


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def plain(request: pytest.FixtureRequest, folder: Path) -> tuple[float, list[list[int]]]:
    return request.param, generate(folder, request.param)[0]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("method", ["ngram", "draft_model", "early_exit"])
def test_the_same_tokens(
    folder: Path, smaller: Path, plain: tuple[float, list[list[int]]], method: str, place: dict[str, Any]
) -> None:
    temperature, expected = plain
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        speculative["model"] = str(smaller)
    if method == "early_exit":
        speculative["exit_layer"] = 1
    tokens, num_drafts, num_accepted = generate(folder, temperature, speculative_config=speculative, **place)
    assert tokens == expected
    assert num_drafts > num_accepted


@pytest.mark.parametrize("place", [PLACES[1], PLACES[2]], ids=str)
@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_a_drafter_that_knows_the_answer_is_always_right(
    folder: Path, plain: tuple[float, list[list[int]]], method: str, place: dict[str, Any]
) -> None:
    """The target itself as a draft model, with its own encoder output; and the layers that decide everything."""
    temperature, expected = plain
    more = {"model": str(folder)} if method == "draft_model" else {"exit_layer": 2}
    speculative = {"method": method, "num_speculative_tokens": 3, **more}
    tokens, num_drafts, num_accepted = generate(folder, temperature, speculative_config=speculative, **place)
    assert tokens == expected
    assert num_drafts == num_accepted > 0


def test_a_draft_models_encoder_must_read_the_same_input(folder: Path, tmp_path: Path) -> None:
    other = tiny_whisper.save(tiny_whisper.build(1, num_mel_bins=6), tmp_path / "bins")
    with pytest.raises(ConfigError, match="reads 6 bins and 100 frames, the target's 8 and 100"):
        open_with_draft_model(folder, other)
    llama = tiny_models.save(tiny_models.build("llama"), tmp_path / "llama")
    with pytest.raises(ConfigError, match="has an encoder, for which requests of the target bring no input"):
        open_with_draft_model(llama, folder)


def open_with_draft_model(target: Path, draft: Path) -> None:
    build_engine(EngineOptions(model=str(target), speculate="draft_model", draft_model=str(draft)))
