"""GGUF checkpoints against the weights they were written from, formulas written out here, and transformers."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.checkpoints.gguf import GGUFCheckpoint
from slipstream.checkpoints.gguf_file import GGUFFile
from slipstream.errors import ModelError
from slipstream.pooling import PoolingDefaults
from tests.checkpoints.tiny_gguf import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    random_state,
    write_model,
)

Q = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> GGUFCheckpoint:
    checkpoint = open_checkpoint(smollm2_path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


# The container


def test_metadata_equals_what_the_gguf_package_reads(smollm2_path: Path, smollm2_reader: gguf.GGUFReader) -> None:
    reader = smollm2_reader
    ours = GGUFFile(smollm2_path, {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()})
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == theirs
    table = [(t.name, t.shape, t.type_id, t.offset, t.num_bytes) for t in ours.tensors]
    assert table == [
        (t.name, tuple(reversed(t.shape.tolist())), int(t.tensor_type), t.data_offset, t.n_bytes)
        for t in reader.tensors
    ]
    last = ours.tensors[-1]
    assert ours.raw(last).tobytes() == reader.tensors[-1].data.tobytes()


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 100, 5000, -4, -1])
def test_truncated_file_is_one_error_naming_it(tmp_path: Path, kept: int) -> None:
    whole = write_model(
        tmp_path / "whole.gguf", "qwen2", random_state("qwen2", 50), tokenizer={"ggml.tokens": ["a"] * 50}
    )
    content = whole.read_bytes()
    assert len(content) > 6000
    path = tmp_path / "part.gguf"
    path.write_bytes(content[:kept])
    with pytest.raises(ModelError, match=r"part\.gguf is half-downloaded or not a GGUF") as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_every_truncation_of_the_header_is_noticed(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf", "qwen3", random_state("qwen3", 4))
    content = whole.read_bytes()
    path = tmp_path / "part.gguf"
    for kept in range(0, 4000, 37):
        path.write_bytes(content[:kept])
        with pytest.raises(ModelError):
            open_checkpoint(path)


def test_other_content_is_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<html>" * 100)
    with pytest.raises(ModelError, match="not a GGUF"):
        open_checkpoint(path)


def test_corrupt_counts_end_at_once(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (2**63).to_bytes(8, "little") * 2 + b"\xff" * 64)
    with pytest.raises(ModelError, match="half-downloaded"):
        open_checkpoint(path)


def test_old_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(64))
    with pytest.raises(ModelError, match="version 1"):
        open_checkpoint(path)


# Weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_come_back_as_they_were_before_conversion(tmp_path: Path, arch: str, tied: bool) -> None:
    state = random_state(arch, 50, tied=tied)
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", arch, state))
    loaded = dict(checkpoint.tensors())
    assert list(loaded) == checkpoint.tensor_names()
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
    assert checkpoint.config["tie_word_embeddings"] is tied


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    state = random_state("llama", 50)
    state = {name: tensor if "norm" in name else tensor.to(dtype) for name, tensor in state.items()}
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "llama", state))
    for name, tensor in checkpoint.tensors():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name]), name
    assert checkpoint.config["torch_dtype"] == str(dtype).removeprefix("torch.")


def decode_by_hand(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of 32 values: a float16 scale, then (4_1) a float16 minimum, then the numbers; low nibbles come first."""
    num_bytes = {Q.Q8_0: 34, Q.Q4_0: 18, Q.Q4_1: 20}[kind]
    blocks = raw.reshape(-1, num_bytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == Q.Q8_0:
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    nibbles = blocks[:, -16:]
    numbers = np.concatenate([nibbles % 16, nibbles // 16], axis=1).astype(np.float32)
    if kind == Q.Q4_0:
        return scale * (numbers - 8)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    return scale * numbers + minimum


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1])
def test_block_encodings(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    state = random_state("qwen2", 70)
    name = "model.layers.1.mlp.down_proj.weight"
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "qwen2", state, quantise={name: kind}))
    loaded = dict(checkpoint.tensors())[name]
    raw = gguf.quants.quantize(state[name].numpy(), kind)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, torch.from_numpy(decode_by_hand(raw, kind).reshape(HIDDEN, MLP)))


def test_large_tensors_are_decoded_in_pieces_without_seams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state("qwen2", 75)
    quantise = {"model.embed_tokens.weight": Q.Q8_0}
    path = write_model(tmp_path / "m.gguf", "qwen2", state, quantise=quantise)
    whole = dict(open_checkpoint(path).tensors())["model.embed_tokens.weight"]
    monkeypatch.setattr("slipstream.checkpoints.gguf._PIECE_ELEMENTS", 7 * HIDDEN)  # 75 rows: the last piece is short
    pieces = dict(open_checkpoint(path).tensors())["model.embed_tokens.weight"]
    assert torch.equal(whole, pieces)


def test_smollm2_tensors_by_hand(smollm2: GGUFCheckpoint, smollm2_reader: gguf.GGUFReader) -> None:
    raw = {tensor.name: tensor for tensor in smollm2_reader.tensors}
    loaded = dict(smollm2.tensors())
    assert len(loaded) == len(raw) == 272

    def by_hand(name: str) -> np.ndarray:
        return decode_by_hand(raw[name].data, raw[name].tensor_type).reshape(tuple(reversed(raw[name].shape.tolist())))

    assert np.array_equal(loaded["model.embed_tokens.weight"].numpy(), by_hand("token_embd.weight"))
    assert np.array_equal(loaded["model.layers.29.mlp.up_proj.weight"].numpy(), by_hand("blk.29.ffn_up.weight"))
    assert np.array_equal(loaded["model.norm.weight"].numpy(), raw["output_norm.weight"].data)
    for kind, name, heads in (("q", "blk.7.attn_q.weight", 9), ("k", "blk.7.attn_k.weight", 3)):
        stored, expected = by_hand(name), np.empty((heads * 64, 576), dtype=np.float32)
        for head in range(heads):
            for idx in range(32):  # the file has a rotated pair side by side, Hugging Face half a head apart
                expected[head * 64 + idx] = stored[head * 64 + 2 * idx]
                expected[head * 64 + 32 + idx] = stored[head * 64 + 2 * idx + 1]
        assert np.array_equal(loaded[f"model.layers.7.self_attn.{kind}_proj.weight"].numpy(), expected)


@pytest.mark.slow
def test_smollm2_equals_transformers_bit_for_bit(smollm2: GGUFCheckpoint, smollm2_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32)
    state = model.state_dict()
    names = []
    for name, tensor in smollm2.tensors():
        names.append(name)
        assert tensor.dtype == state[name].dtype == torch.float32
        assert torch.equal(tensor, state[name]), name
    assert set(state) - set(names) == {"lm_head.weight"}  # tied
    theirs = model.config.to_dict()
    derived = {"architectures", "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor"}
    for key in set(smollm2.config) - derived:
        assert smollm2.config[key] == theirs[key], key
    assert smollm2.config["rope_theta"] == theirs["rope_parameters"]["rope_theta"]
    assert smollm2.config["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tiny_models_equal_transformers(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = {"ggml.model": "gpt2", "ggml.tokens": [f"t{idx}" for idx in range(50)], "ggml.eos_token_id": 3}
    # transformers takes a head's size from this key for llama, and from nowhere for the others (5.23): it is told.
    metadata = {f"{arch}.rope.dimension_count": HEAD_DIM}
    state = random_state(arch, 50)
    quantise = {name: Q.Q8_0 for name in state if "_proj.weight" in name}
    path = write_model(
        tmp_path / "m.gguf", arch, state, quantise=quantise, tokenizer=tokenizer, extra_metadata=metadata
    )
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    config.head_dim = HEAD_DIM
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32, config=config)
    expected = model.state_dict()
    loaded = dict(open_checkpoint(path).tensors())
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name


# Config


def test_smollm2_config(smollm2: GGUFCheckpoint) -> None:
    config = smollm2.config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (576, 30, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert config["rope_theta"] == 100000.0
    assert config["rope_scaling"] is None
    assert config["tie_word_embeddings"] is True
    assert config["attention_bias"] is False
    assert config["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)
    assert smollm2.generation_config["eos_token_id"] == [2]


@pytest.mark.parametrize(
    ("arch", "model_class"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_config_of_each_architecture(tmp_path: Path, arch: str, model_class: str) -> None:
    config = open_checkpoint(write_model(tmp_path / "m.gguf", arch, random_state(arch, 50))).config
    assert config["architectures"] == [model_class]
    assert config["model_type"] == arch
    assert config["hidden_size"] == HIDDEN
    assert config["intermediate_size"] == MLP
    assert config["num_hidden_layers"] == LAYERS
    assert config["num_attention_heads"] == HEADS
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["head_dim"] == HEAD_DIM  # not hidden_size / num_heads: the file says so
    assert config["max_position_embeddings"] == CONTEXT
    assert config["rope_theta"] == 5000.0
    assert config["vocab_size"] == 50
    assert config["attention_bias"] is (arch == "qwen2")
    assert config["torch_dtype"] == "float32"


def llama3_factors() -> list[float]:
    """Llama 3.1's published scaling as divisors: wavelengths under 8192 / 4 stay, over 8192 are slowed eightfold."""
    factors = []
    for idx in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 500000.0 ** (2 * idx / HEAD_DIM)
        smooth = min(max((8192 / wavelength - 1) / (4 - 1), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / 8 + smooth))
    return factors


def test_llama3_rope_scaling_comes_as_factors(tmp_path: Path) -> None:
    factors = np.array(llama3_factors(), dtype=np.float32)
    path = write_model(
        tmp_path / "m.gguf", "llama", random_state("llama", 50), extra_tensors={"rope_freqs.weight": factors}
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["rope_freq_factors"] == factors.tolist()
    assert not [name for name in checkpoint.tensor_names() if "rope" in name]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"qwen2.rope.scaling.type": "none"}, None),
        ({"qwen2.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 128,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any] | None) -> None:
    path = write_model(tmp_path / "m.gguf", "qwen2", random_state("qwen2", 50), extra_metadata=metadata)
    assert open_checkpoint(path).config["rope_scaling"] == expected


def test_all_end_tokens_of_a_model_are_found(tmp_path: Path) -> None:
    tokens = ["a", "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>"]
    tokenizer = {
        "ggml.tokens": tokens,
        "ggml.token_type": [1, 3, 3, 3, 3, 1],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 4,
    }
    path = write_model(tmp_path / "m.gguf", "llama", random_state("llama", 6), tokenizer=tokenizer)
    generation = open_checkpoint(path).generation_config
    assert generation["eos_token_id"] == [4, 2, 3]
    assert generation["bos_token_id"] == 1


# What is not supported


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "mamba", random_state("qwen2", 50))
    with pytest.raises(ModelError, match=r"'mamba'.*llama, qwen2, qwen3"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"split.count": 3}, {}, "one of several parts"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "longrope"),
        ({"llama.rope.dimension_count": 16}, {}, "rotates 16 of 32"),
        ({}, {"blk.0.ffn_gate_exps.weight": np.zeros((2, 32), np.float32)}, "blk.0.ffn_gate_exps.weight"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], message: str
) -> None:
    path = write_model(
        tmp_path / "m.gguf", "llama", random_state("llama", 50), extra_metadata=metadata, extra_tensors=tensors
    )
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_missing_gguf_package_says_what_to_install(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_gguf(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf" or name.startswith("gguf."):
            raise ImportError("No module named 'gguf'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_gguf)
    with pytest.raises(ModelError, match="pip install gguf"):
        open_checkpoint(smollm2_path)


def test_tensors_are_read_one_by_one(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    iterator = checkpoint.tensors()
    name, tensor = next(iterator)
    assert name == "model.embed_tokens.weight"
    tensor.zero_()  # the caller's own memory, not the file's
    again_name, again = next(checkpoint.tensors())
    assert again_name == name
    assert again.abs().sum() > 0


@pytest.mark.parametrize(("number", "kind"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last")])
def test_pooling_is_what_the_file_says(tmp_path: Path, number: int | None, kind: str) -> None:
    extra = {} if number is None else {"qwen3.pooling_type": number}
    path = write_model(tmp_path / "m.gguf", "qwen3", random_state("qwen3", 4), extra_metadata=extra)
    assert open_checkpoint(path).pooling_defaults() == PoolingDefaults(kind, True)


def test_pooling_for_ranking_is_refused_when_it_is_used(tmp_path: Path) -> None:
    extra = {"qwen3.pooling_type": 4}
    path = write_model(tmp_path / "m.gguf", "qwen3", random_state("qwen3", 4), extra_metadata=extra)
    defaults = open_checkpoint(path).pooling_defaults()
    assert defaults.refusal == f"{path} asks for pooling of type 4, which is not supported"
