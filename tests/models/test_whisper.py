"""Whisper against ``transformers``: logits and tokens, alone and in company, and what requests must bring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from slipstream import LLM, RequestError, SamplingParams
from slipstream.attention.context import StepTokens
from slipstream.config import EngineOptions
from slipstream.encoder_input import EncoderInput, EncoderPrompt
from slipstream.engine.build import build_engine
from slipstream.errors import ConfigError, ModelError
from slipstream.plan import EncoderRun
from slipstream.runner.encoder_step import EncoderStep
from tests import tiny_models, tiny_whisper
from tests.contexts import one_prompt
from tests.tiny_whisper import MAX_ENTRIES, NUM_BINS

PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
PROMPTS = tiny_whisper.make_prompts(3)
SIM: dict[str, Any] = {"device": "sim", "steps_in_flight": 3, "cudagraph_capture_sizes": (4, 8, 32)}


@pytest.fixture(scope="module")
def reference() -> WhisperForConditionalGeneration:
    return tiny_whisper.build()


@pytest.fixture(scope="module")
def folder(reference: WhisperForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper.save(reference, tmp_path_factory.mktemp("tiny-whisper"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
    return [tiny_whisper.greedy(model, prompt, 64) for prompt in PROMPTS]


# Few tokens run as one operation over all layers where there are C kernels and the backend reads pages in place.
@pytest.mark.parametrize("num_tokens", [40, 7])
@pytest.mark.parametrize("attention_backend", ["cpu", "reference"])
def test_logits(
    reference: WhisperForConditionalGeneration, folder: Path, attention_backend: str, num_tokens: int
) -> None:
    options = EngineOptions(model=str(folder), dtype="float32", max_num_seqs=1, attention_backend=attention_backend)
    engine = build_engine(options)
    runner, prompt, token_ids = engine.core.runner, PROMPTS[0], [*range(100, 100 + num_tokens)]
    page_size, rows = engine.config.cache.page_size, runner.rows.encoder
    assert rows is not None and runner.encoder is not None
    num_text, num_encoded = (-(-count // page_size) for count in (len(token_ids), MAX_ENTRIES))
    rows.page_table[0] = torch.arange(1 + num_text, 1 + num_text + num_encoded)
    rows.lens[0] = MAX_ENTRIES
    tokens = one_prompt(len(token_ids), page_size)
    assert tokens.common is not None
    common = replace(tokens.common, encoder=rows, batch_rows=torch.zeros(1, dtype=torch.int32))
    tokens = StepTokens(tokens.positions, tokens.slot_mapping, common)
    with torch.inference_mode():
        runner.encoder.run([EncoderRun(0, prompt.encoder, MAX_ENTRIES)])
        hidden = runner.program.model.forward(torch.tensor(token_ids, dtype=torch.int32), runner.caches.begin(tokens))
        logits = runner.program.model.compute_logits(hidden)
        features = torch.from_numpy(prompt.encoder.features)[None]
        right = reference(input_features=features, decoder_input_ids=torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-4)


def generate(folder: Path, prompts: Sequence[EncoderPrompt] = PROMPTS, **options: Any) -> list[list[int]]:
    """All prompts twice, the second time with what the cache has of the first."""
    with LLM(str(folder), **{"dtype": "float64", "max_num_seqs": 4, **options}) as llm:
        outputs = [*llm.generate(prompts, PARAMS), *llm.generate(prompts, PARAMS)]
        assert not [output.error for output in outputs if output.error is not None]
        assert llm.stats.num_sync_violations == 0
        if "num_gpu_blocks_override" in options:
            assert llm.stats.num_preemptions
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"block_size": 1},
        {"num_gpu_blocks_override": 20},
        {"own_process": True},
        {**SIM, "cudagraph_mode": "full"},
        {**SIM, "cudagraph_mode": "piecewise", "num_gpu_blocks_override": 20},
    ],
    ids=str,
)
def test_greedy_tokens(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    assert generate(folder, **options) == expected * 2
    assert all(len(set(tokens)) > 6 for tokens in expected), "a stuck model would prove nothing"


def test_shorter_inputs_are_read_as_far_as_they_go(folder: Path) -> None:
    """``transformers`` takes whole windows only; its encoder, part by part, shorter ones as well."""
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
    prompts = tiny_whisper.make_prompts(2, num_frames=34)
    model.model.encoder.embed_positions.weight.data = model.model.encoder.embed_positions.weight.data[:17]
    model.model.encoder.embed_positions.num_embeddings = 17
    model.config.max_source_positions = model.model.encoder.max_source_positions = 17
    assert generate(folder, prompts) == [tiny_whisper.greedy(model, prompt, 64) for prompt in prompts] * 2


def test_what_an_encoder_has_read_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, run = [], EncoderStep.run
    monkeypatch.setattr(EncoderStep, "run", lambda self, runs: (counts.append(len(runs)), run(self, runs))[1])
    generate(folder)
    assert sum(counts) == len(PROMPTS)
    counts.clear()
    generate(folder, enable_prefix_caching=False)
    assert sum(counts) == 2 * len(PROMPTS)


def test_pages_are_not_shared_between_inputs(folder: Path, expected: list[list[int]]) -> None:
    """Texts of several pages that begin alike, and inputs that differ."""
    text = [*range(40, 75)]
    prompts = [EncoderPrompt(text, prompt.encoder) for prompt in PROMPTS]
    assert generate(folder, prompts) == generate(folder, prompts, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([258], "this model has an encoder: give an EncoderPrompt"),
        (EncoderPrompt([], PROMPTS[0].encoder), "the prompt is empty"),
        (
            EncoderPrompt([258], EncoderInput(np.zeros((NUM_BINS + 1, 100), np.float32))),
            r"has shape \[9, 100\]; the model reads \[8, up to 100\]",
        ),
        (EncoderPrompt([258], EncoderInput(np.zeros((NUM_BINS, 102), np.float32))), "up to 100"),
        (EncoderPrompt([258], EncoderInput(np.zeros((NUM_BINS, 7), np.float32))), "multiple of 2 frames"),
        (EncoderPrompt([258], np.zeros((NUM_BINS, 100))), "must be an EncoderInput"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(folder: Path, prompt: Any, message: str) -> None:
    with LLM(str(folder), max_num_seqs=1) as llm, pytest.raises(RequestError, match=message):
        llm.generate(prompt, PARAMS)


def test_a_cache_that_cannot_hold_the_encoders_output_says_so(folder: Path) -> None:
    with (
        LLM(str(folder), max_num_seqs=1, num_gpu_blocks_override=5) as llm,
        pytest.raises(RequestError, match="may grow to 65 tokens, but the KV cache holds 16 beside the 50 entries"),
    ):
        llm.generate(PROMPTS[0], PARAMS)


def test_pages_of_both_kinds_are_planned_and_share_memory(folder: Path) -> None:
    config = build_engine(EngineOptions(model=str(folder), dtype="float32", max_num_seqs=3)).config
    assert config.cache.num_pages - 1 == 3 * (128 // 16 + -(-MAX_ENTRIES // 16))
    of_a_page = 3 * 2 * 48 * 16 * 4  # three layers, keys and values, 16 slots, float32
    assert config.cache_bytes == config.cache.num_pages * of_a_page
    assert len(config.model.cache_specs) == 6


def test_a_model_without_an_encoder_refuses_its_input(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.build("llama"), tmp_path)
    with LLM(str(tmp_path), max_num_seqs=1) as llm, pytest.raises(RequestError, match="this model has no encoder"):
        llm.generate(PROMPTS[0], PARAMS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation 'relu'.*only gelu"),
        ({"decoder_attention_heads": 7}, "7 heads for a width of 48"),
        ({"tie_word_embeddings": False}, "weights of its own"),
        ({"encoder_layers": 3}, "weights of 2 layers, its config says 3"),
        ({"d_model": None}, "no valid 'd_model'"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=message):
        build_engine(EngineOptions(model=str(tmp_path)))


def test_a_backend_without_attention_over_an_encoder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend flex cannot attend to the output of an encoder; use cpu"):
        build_engine(EngineOptions(model=str(folder), attention_backend="flex"))


def test_features_are_checked() -> None:
    with pytest.raises(ValueError, match=r"float32 array of two dimensions.*float64 with shape \(8, 4\)"):
        EncoderInput(np.zeros((8, 4)))
    one, other = (np.arange(8, dtype=np.float32).reshape(shape) for shape in ((2, 4), (4, 2)))
    assert EncoderInput(one).digest() == EncoderInput(one.copy()).digest() != EncoderInput(other).digest()
