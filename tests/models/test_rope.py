"""Rotary frequencies and attention factors against ``transformers``, and the two rules that are the engine's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.checkpoints.hf_config import read_decoder_config, read_rope
from slipstream.config import EngineOptions, RopeConfig
from slipstream.engine.build import build_engine
from slipstream.errors import ModelError
from slipstream.llm import LLM
from slipstream.models.phi3 import Phi3
from slipstream.models.rope import cos_sin_table, inverse_frequencies
from slipstream.sampling_params import SamplingParams
from tests import tiny_models

from .test_parity import all_logits

HEAD_DIM, MAX_POSITION = 64, 4096
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 50 for i in range(32)],
    "long_factor": [1.0 + i * i / 20 for i in range(32)],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 512},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 10.0,
        "beta_slow": 2.0,
    },
    "yarn-fractional-bounds": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.25,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn-narrow": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 1e9,
        "beta_slow": 1e8,
    },
    "longrope": {**LONGROPE, "original_max_position_embeddings": 512},
    "longrope-factor": {**LONGROPE, "original_max_position_embeddings": 512, "factor": 3.0},
    "longrope-attention-factor": {
        **LONGROPE,
        "original_max_position_embeddings": 512,
        "factor": 8.0,
        "attention_factor": 1.5,
    },
    "longrope-not-longer": {**LONGROPE, "original_max_position_embeddings": MAX_POSITION},
}


def read(scaling: dict[str, Any], **others: Any) -> RopeConfig:
    return read_rope({"rope_parameters": {"rope_theta": 10000.0, **scaling}, **others}, HEAD_DIM, MAX_POSITION)


def theirs(scaling: dict[str, Any], seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 10000.0, **scaling},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=seq_len)
    return inv_freq, attention_factor


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor(name: str, partial: float) -> None:
    scaling = {**SCALINGS[name], "partial_rotary_factor": partial}
    num_pairs = int(HEAD_DIM * partial) // 2
    for key in ("short_factor", "long_factor"):
        if key in scaling:
            scaling[key] = scaling[key][:num_pairs]
    rope = read(scaling)
    assert rope.rotary_dim == 2 * num_pairs
    for length in (16, 513, MAX_POSITION):
        expected, factor = theirs(scaling, length)
        torch.testing.assert_close(inverse_frequencies(rope, length), expected, rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 6000, 16384])
def test_dynamic_frequencies_of_a_position_are_those_of_the_sequence_it_ends(length: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    inv_freq = inverse_frequencies(read(scaling), length)
    assert inv_freq.shape == (length, HEAD_DIM // 2)
    torch.testing.assert_close(inv_freq[-1], theirs(scaling, length)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["linear", "yarn", "dynamic"])
def test_pieces_of_a_table_have_no_seams(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rope = read({"rope_type": "dynamic", "factor": 4.0} if name == "dynamic" else SCALINGS[name])
    inv_freq = inverse_frequencies(rope, 6000).double()
    angles = torch.arange(6000, dtype=torch.float64).unsqueeze(1) * inv_freq
    expected = torch.stack([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
    monkeypatch.setattr("slipstream.models.rope._PIECE", 1700)  # the last piece is short
    table = cos_sin_table(rope, 6000, torch.device("cpu"))
    # The angle itself is rounded to float32: half a unit in the last place of numbers up to 6000.
    torch.testing.assert_close(table.double(), expected, rtol=0, atol=6000 * 2**-24 * rope.attention_factor + 1e-6)


@pytest.mark.parametrize(("kind", "rotary_dim", "least"), [("linear", 0, 2), ("linear", 7, 2), ("dynamic", 2, 4)])
def test_dimensions_that_cannot_be_rotated(kind: Any, rotary_dim: int, least: int) -> None:
    rope = RopeConfig(kind=kind, rotary_dim=rotary_dim, original_max_position=16)
    with pytest.raises(ModelError, match=rf"rotates {rotary_dim} dimensions of a head.*at least {least} is needed"):
        cos_sin_table(rope, 10, torch.device("cpu"))


def test_the_attention_factor_is_in_the_table() -> None:
    table = cos_sin_table(read(SCALINGS["yarn"]), 10, torch.device("cpu"))
    lengths = (table**2).sum(1).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, 0.1 * math.log(4.0) + 1))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),  # as Qwen2.5 publishes it
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        ({"type": "linear", "factor": 2.0}, 4096),
        (None, 4096),
    ],
)
def test_scaling_that_stretches_the_context_counts(scaling: dict[str, Any] | None, expected: int) -> None:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    hf = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "rope_scaling": scaling}
    assert read_decoder_config({**hf, **dict.fromkeys(names, 8)}).max_position == expected


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_spells_longrope_in_three_ways(name: str) -> None:
    names = ("vocab_size", "intermediate_size", "num_hidden_layers")
    hf = {
        "architectures": ["Phi3ForCausalLM"],
        **dict.fromkeys(names, 8),
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": name, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    }
    rope = Phi3.read_config(hf).rope
    assert (rope.kind, rope.original_max_position, rope.factor) == ("longrope", 4096, 32.0)
    assert rope.attention_factor == pytest.approx(1.1902380714238083)  # as the model's own code computes it


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "rope scaling 'spiral'.*yarn, dynamic, longrope"),
        ({**LONGROPE, "long_factor": [1.0]}, "1 values of 'long_factor'.*32"),
        ({"rope_type": "longrope"}, "0 values of 'short_factor'"),
        ({"rope_type": ["yarn"]}, r"'rope_parameters.rope_type': \['yarn'\] is not a text"),
        ({"rope_type": "yarn", "factor": 0}, "'rope_parameters.factor': 0 is not a number above 0"),
        ({"rope_type": "yarn", "factor": math.nan}, "'rope_parameters.factor': nan is not a number"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}, "low_freq_factor of 4, which is not below"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 1}, "over 1 position; at least two"),
        ({**LONGROPE, "long_factor": [1.0] * 31 + [0.0]}, "'rope_parameters.long_factor': .* numbers above 0"),
        ({"partial_rotary_factor": 1.5}, "'rope_parameters.partial_rotary_factor': 1.5 is not a number"),
    ],
)
def test_what_cannot_be_read_is_named(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(scaling)


def test_dynamic_beyond_the_original_context_equals_incremental_decoding(tmp_path: Path) -> None:
    reference = tiny_models.build("llama-dynamic-rope", max_position_embeddings=32)
    tiny_models.save(reference, tmp_path)
    engine = build_engine(EngineOptions(model=str(tmp_path), dtype="float32"))
    assert engine.config.scheduler.max_model_len == 128
    prompt = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    tokens = reference.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=100)
    with LLM(build=lambda: engine) as llm:
        output = llm.generate(prompt[0].tolist(), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))[0]
    assert output.token_ids == tokens[0, 20:].tolist()
    assert len(set(output.token_ids)) > 8


@pytest.mark.parametrize(("max_model_len", "prompt_len"), [(200, 150), (512, 250)])
def test_longrope_is_chosen_by_the_length_the_engine_admits(
    tmp_path: Path, max_model_len: int, prompt_len: int
) -> None:
    """Short factors up to the original context, long ones beyond; transformers chooses by the prompt's length."""
    reference = tiny_models.build("phi3-longrope", original_max_position_embeddings=200)
    tiny_models.save(reference, tmp_path)
    engine = build_engine(EngineOptions(model=str(tmp_path), dtype="float32", max_model_len=max_model_len))
    prompt = torch.randint(0, 256, (1, prompt_len), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(prompt).logits[0]
    torch.testing.assert_close(all_logits(engine, prompt[0].tolist()), expected, rtol=1e-4, atol=1e-4)
