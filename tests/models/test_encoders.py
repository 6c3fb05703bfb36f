"""Encoders against ``transformers``: vectors of texts of many lengths, alone and together, on a CPU and simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from slipstream.errors import ConfigError, ModelError, RequestError
from slipstream.llm import LLM
from slipstream.models.encoder import relative_buckets
from tests.models import tiny_encoders

LENGTHS = (1, 2, 128, 17, 17, 60, 5, 90)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 250, (length,), generator=generator).tolist() for length in LENGTHS]


def expected(model: PreTrainedModel, token_ids: list[int], kind: str) -> np.ndarray:
    with torch.no_grad():
        # A mask, since some models take tokens for padding by their ids.
        states = model(torch.tensor([token_ids]), attention_mask=torch.ones(1, len(token_ids))).last_hidden_state[0]
    vector = {"last": states[-1], "cls": states[0], "mean": states.mean(0), "max": states.max(0).values}[kind]
    return (vector / vector.norm()).double().numpy()


@pytest.mark.parametrize("variant", [name for name in tiny_encoders.VARIANTS if not name.endswith(("er", "encoder"))])
def test_equals_transformers(tmp_path: Path, variant: str) -> None:
    model = tiny_encoders.build(variant)
    folder = tiny_encoders.save(model, tmp_path)
    for options in ({"max_num_seqs": 1}, {"dtype": "float64", "max_num_batched_tokens": 130, "max_model_len": 128}):
        with LLM(str(folder), **options) as llm:
            for kind in ("mean", "cls", "max"):
                for ids, output in zip(prompts(), llm.embed(prompts(), pooling=kind), strict=True):
                    assert output.error is None and output.num_cached_tokens == 0
                    np.testing.assert_allclose(output.embedding, expected(model, ids, kind), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["none", "full", "full_and_piecewise"])
def test_on_the_simulated_device(tmp_path: Path, mode: str) -> None:
    """Several steps in flight, in graphs and without."""
    model = tiny_encoders.build("bert")
    folder = tiny_encoders.save(model, tmp_path)
    options: dict[str, Any] = {"device": "sim", "dtype": "float64", "steps_in_flight": 3, "max_num_seqs": 3}
    with LLM(str(folder), **options, cudagraph_mode=mode, cudagraph_capture_sizes=(16, 64)) as llm:
        for ids, output in zip(prompts(), llm.embed(prompts(), pooling="mean"), strict=True):
            np.testing.assert_allclose(output.embedding, expected(model, ids, "mean"), rtol=0, atol=1e-5)


def test_mean_is_what_a_checkpoint_without_files_gets(tmp_path: Path) -> None:
    model = tiny_encoders.build("bert")
    with LLM(str(tiny_encoders.save(model, tmp_path))) as llm:
        (output,) = llm.embed([[5, 6, 7]])
        np.testing.assert_allclose(output.embedding, expected(model, [5, 6, 7], "mean"), rtol=0, atol=1e-5)


def test_buckets_are_those_of_transformers() -> None:
    distances = torch.arange(-400, 401)
    theirs = MPNetEncoder.relative_position_bucket(distances, num_buckets=32)
    assert torch.equal(relative_buckets(distances, 32, 128), theirs)


def test_what_an_encoder_cannot_do_is_one_line(tmp_path: Path) -> None:
    folder = tiny_encoders.save(tiny_encoders.build("roberta"), tmp_path)
    with LLM(str(folder)) as llm:
        assert llm.config.scheduler.max_model_len == 128  # two of the table's places are before a text's first
        with pytest.raises(RequestError, match=r"cannot generate; call embed"):
            llm.generate("hello")
        with pytest.raises(RequestError, match=r"has 129 tokens, the context holds 128; shorten the prompt"):
            llm.embed([[5] * 129])
    for options, message in (
        ({"max_num_batched_tokens": 100}, "max_num_batched_tokens 100 is below max_model_len 128: every token"),
        ({"long_prefill_token_threshold": 7}, "long_prefill_token_threshold 7 is below max_model_len 128: every token"),
        ({"speculate": "ngram"}, "encodes texts and generates none"),
    ):
        with pytest.raises(ConfigError) as caught:
            LLM(str(folder), **options)
        assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu6"}, "activation 'relu6'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "says is_decoder"),
        ({"num_hidden_layers": 9}, "has weights of 3 layers, its config says 9"),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    import json

    folder = tiny_encoders.save(tiny_encoders.build("bert"), tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        LLM(str(folder))
