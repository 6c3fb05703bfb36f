"""Counts, types and shapes that a damaged file claims: refused from the headers alone, before anything is built."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.errors import ModelError
from slipstream.models.decoder import Decoder
from slipstream.models.heads.registry import read_head
from slipstream.models.load import open_decoder
from tests import tiny_models
from tests.checkpoints.tiny_gguf import HEAD_DIM, HEADS, random_state, write_model
from tests.corruption.gguf_image import Image, Row, Value, nested
from tests.models.heads.tiny_heads import CASES, tiny_target

_STRING, _ARRAY, _UINT32 = 8, 9, 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    tokenizer = {"ggml.model": "gpt2", "ggml.tokens": ["a", "b"] * 25, "ggml.merges": ["a b"]}
    return write_model(path, "llama", random_state("llama", 50), tokenizer=tokenizer).read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path / "model")


def refuse_within_a_second(read: Callable[[Path], Any], path: Path, message: str) -> None:
    start = time.process_time()  # its own: other processes may want the machine
    with pytest.raises(ModelError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value) or "tensor '" in str(caught.value)
    assert time.process_time() - start < 20.0, "milliseconds are usual; what a file's numbers lead astray takes minutes"


# GGUF


def set_value(image: Image, key: str, value: Value) -> None:
    image.pairs = [(name, value if name == key.encode() else old) for name, old in image.pairs]


def set_number(image: Image, key: str, number: int) -> None:
    set_value(image, key, Value(_UINT32, number))


def long_array(image: Image) -> None:
    value = next(value for key, value in image.pairs if key == b"tokenizer.ggml.tokens")
    value.count = 1 << 60


def byte_array(image: Image) -> None:
    """As many items as the file has bytes and more: they would be there, but for each a Python object is made."""
    image.pairs.insert(0, (b"general.x", Value(_ARRAY, struct.pack("<IQ", 0, (1 << 23) + 1))))
    image.data += bytes(1 << 24)


def rename(image: Image, old: bytes, new: bytes) -> None:
    next(row for row in image.rows if row.name == old).name = new


def other_rows(image: Image, name: bytes, num_rows: int) -> None:
    row = next(row for row in image.rows if row.name == name)
    row.dims[1] = num_rows


GGUF_FAULTS: dict[str, tuple[Callable[[Image], object], str]] = {
    "layers": (lambda i: set_number(i, "llama.block_count", 0xFFFFFFFF), "'llama.block_count': 4294967295 is not an"),
    "layers without weights": (
        lambda i: set_number(i, "llama.block_count", 4000),
        "weights of 2 layers, its config says 4000",
    ),
    "arrays in arrays": (lambda i: i.pairs.append((b"x", nested(500))), "nests arrays more than 4 deep"),
    "items": (long_array, "array of 1152921504606846976 items"),
    "items that are there": (byte_array, "array of 8388609 items"),
    "keys": (lambda i: setattr(i, "counts", [len(i.rows), 1 << 63]), "ends before the 9223372036854775808 entries"),
    "tensors": (lambda i: setattr(i, "counts", [1 << 40, len(i.pairs)]), "ends before the 1099511627776 entries"),
    "same key": (lambda i: i.pairs.append(i.pairs[0]), "'general.architecture' twice"),
    "same tensor": (lambda i: i.rows.append(i.rows[0]), "'token_embd.weight' twice"),
    "rows of q": (lambda i: other_rows(i, b"blk.0.attn_q.weight", 100), "has shape .100, 64., the config says"),
    "rows of k": (lambda i: set_number(i, "llama.attention.head_count_kv", 4), "k_proj.weight' has shape .64, 64."),
    "empty tensor": (lambda i: other_rows(i, b"blk.0.attn_q.weight", 0), "is empty"),
    "number of a layer": (
        lambda i: rename(i, b"blk.0.attn_q.weight", b"blk." + b"9" * 5000 + b".attn_q.weight"),
        "does not have; not supported",
    ),
    "layer that is none": (
        lambda i: rename(i, b"blk.0.attn_q.weight", b"blk.00.attn_q.weight"),
        "'blk.00.attn_q.weight', which",
    ),
    "heads": (lambda i: set_number(i, "llama.attention.head_count", 1 << 31), "'llama.attention.head_count'"),
    "context": (lambda i: set_number(i, "llama.context_length", 1 << 30), "'llama.context_length': 1073741824"),
    "text for a number": (
        lambda i: set_value(i, "llama.block_count", Value(_STRING, b"2")),
        "'llama.block_count': '2' is not an integer",
    ),
    "base": (lambda i: set_value(i, "llama.rope.freq_base", Value(6, float("nan"))), "'llama.rope.freq_base': nan"),
    "rotary factors": (
        lambda i: rename(i, b"output.weight", b"rope_freqs.weight"),
        r"rope_freqs.weight has shape \[50, 64\]|rope_freq_factors",
    ),
}


@pytest.mark.parametrize("name", GGUF_FAULTS)
def test_gguf_files(tmp_path: Path, whole: bytes, name: str) -> None:
    damage, message = GGUF_FAULTS[name]
    image = Image.read(whole)
    damage(image)
    path = tmp_path / "m.gguf"
    path.write_bytes(image.write())
    refuse_within_a_second(open_decoder, path, message)


def test_the_gguf_file_they_were_made_from_is_whole(tmp_path: Path, whole: bytes) -> None:
    image = Image.read(whole)
    assert image.write() == whole
    image.pairs.append((b"general.x", nested(4)))
    path = tmp_path / "m.gguf"
    path.write_bytes(image.write())
    open_decoder(path)


@pytest.mark.parametrize("heads", [3, 2 * HEADS])
def test_rows_that_are_no_whole_heads_are_not_reordered(tmp_path: Path, whole: bytes, heads: int) -> None:
    image = Image.read(whole)
    set_number(image, "llama.attention.head_count", heads)
    set_number(image, "llama.attention.head_count_kv", 1)
    path = tmp_path / "m.gguf"
    path.write_bytes(image.write())
    checkpoint = open_checkpoint(path)
    with pytest.raises(ModelError, match=rf"has 128 rows, the metadata says {heads} heads of {HEAD_DIM}"):
        list(checkpoint.tensors())


def test_tokens_of_any_length_are_no_work_for_minutes(tmp_path: Path) -> None:
    """Where merges follow from scores, every way to cut a token is tried, and each copies it."""
    tokens = ["<unk>", "a", "b", "ab" * 500_000]
    tokenizer = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": [0.0] * 4,
        "ggml.token_type": [2, 1, 1, 1],
    }
    path = write_model(tmp_path / "m.gguf", "llama", random_state("llama", 4), tokenizer=tokenizer)
    refuse_within_a_second(lambda file: open_checkpoint(file).tokenizer(), path, "a token of 1000000 characters")


# Safetensors


def write_header(path: Path, entry: Any) -> None:
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}, "'a' has shape .1099511627776."),
        ({"dtype": "F32", "shape": [1 << 40, 0], "data_offsets": [0, 0]}, "'a' has shape"),
        ({"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 8]}, "'a' has shape"),
        ({"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}, "'a' has shape .'2'."),
        ({"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}, "'a' has shape .True, 2."),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "'a' lies at .8, 0."),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "'a' lies at .-8, 0."),
        ({"dtype": "F32", "shape": [2], "data_offsets": "08"}, "'a' lies at '08'"),
        ({"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}, "'a' is stored as 'F31'"),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, "'a' is stored as .'F32'."),
    ],
)
def test_safetensors_headers(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_header(tmp_path / "model.safetensors", entry)
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{message}"):
        open_checkpoint(tmp_path)


def test_a_header_in_a_header_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    content = b'{"a":' * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(ModelError, match="corrupt header"):
        open_checkpoint(tmp_path)


# What a config says beside the tensors


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


CONFIG_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 1 << 40}, "'num_hidden_layers': 1099511627776 is not an integer from 1 to 4096"),
    "layers without weights": ({"num_hidden_layers": 4096}, "weights of 3 layers, its config says 4096"),
    "architecture": ({"architectures": -1}, "'architectures': -1 is not a list of texts"),
    "architectures": ({"architectures": [-1]}, r"'architectures': \[-1\] is not a list of texts"),
    "rope": ({"rope_parameters": True}, "'rope_parameters': True is not an object"),
    "theta": ({"rope_parameters": {"rope_theta": "x"}}, "'rope_parameters.rope_theta': 'x' is not a number"),
    "vocabulary": ({"vocab_size": 1 << 24}, "weight' has shape .272, 48., the config says .16777216, 48."),
    "hidden size": ({"hidden_size": 1 << 18}, "has shape .272, 48., the config says .272, 262144."),
    "activation": ({"hidden_act": ["silu"]}, "'hidden_act': .'silu'. is not a text"),
    "eps": ({"rms_norm_eps": float("nan")}, "'rms_norm_eps': nan is not a number from 0 to 1"),
    "context": ({"max_position_embeddings": 1 << 40}, "'max_position_embeddings': 1099511627776"),
    "ties": ({"tie_word_embeddings": "no"}, "'tie_word_embeddings': 'no' is not true or false"),
    "heads": ({"num_key_value_heads": 4}, "6 heads for 4 heads of keys and values"),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_configs(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values, message = CONFIG_FAULTS[name]
    change(folder, **values)
    if "layers" in name:  # not even without memory: a layer takes time as well
        monkeypatch.setattr(Decoder, "__init__", lambda *_: pytest.fail("built a model"))
    refuse_within_a_second(open_decoder, folder, message)


def test_experts_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.save(tiny_models.build("qwen3-moe"), tmp_path / "model")
    open_decoder(folder)
    change(folder, num_experts=1 << 14)
    monkeypatch.setattr(Decoder, "__init__", lambda *_: pytest.fail("built a model"))
    refuse_within_a_second(open_decoder, folder, "weights of 6 experts, its config says 16384")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", torch.ones(48, dtype=torch.int32), "'model.norm.weight' holds torch.int32"),
        ("model.norm.weight", torch.ones(48, dtype=torch.bool), "'model.norm.weight' holds torch.bool"),
        ("model.norm.weight", torch.tensor(1.0), "'model.norm.weight' has shape .., the config says .48."),
        ("model.layers." + "9" * 5000 + ".x", torch.ones(1), "does not belong to LlamaForCausalLM"),
        ("x", torch.ones(1), "tensor 'x' does not belong to LlamaForCausalLM"),
    ],
)
def test_tensors(folder: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), name: tensor}, weights)
    refuse_within_a_second(open_decoder, folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1 << 40}, "'num_hidden_layers': 1099511627776"),
        ({"architectures": [5]}, "'architectures': .5. is not a list of texts"),
        ({"rope_scaling": [1]}, "'rope_scaling': .1. is not an object"),
        ({"draft_vocab_size": 1 << 40}, "'draft_vocab_size': 1099511627776"),
        ({"layer_types": [["full_attention"]]}, "'layer_types': ..'full_attention'.. is not a list of texts"),
        ({"eagle_aux_hidden_state_layer_ids": [True, 2, 3]}, "different numbers of layers, not .True, 2, 3."),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"attention_bias": 3}},
            "'attention_bias': 3 is not",
        ),
    ],
)
def test_configs_of_heads(changes: dict[str, Any], message: str) -> None:
    case = CASES["eagle3 with everything left out"]()
    target = tiny_target().model.config
    read_head(case.config, target)
    with pytest.raises(ModelError, match=message):
        read_head({**case.config, **changes}, target)


def test_a_row_of_the_table_is_as_the_format_has_it(whole: bytes) -> None:
    """The image that all damage starts from, against the sizes that the file was written with."""
    rows = {row.name: row for row in Image.read(whole).rows}
    assert rows[b"blk.0.attn_q.weight"].dims == [64, HEADS * HEAD_DIM]
    assert isinstance(rows[b"token_embd.weight"], Row)
    assert rows[b"token_embd.weight"].dims == [64, 50]
