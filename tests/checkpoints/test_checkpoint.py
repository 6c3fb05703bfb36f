"""Safetensors folders: whole, sharded, and damaged in the ways downloads get damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.checkpoints.checkpoint import SafetensorsCheckpoint, open_checkpoint
from slipstream.errors import ModelError


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype=torch.float32,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def single(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def assert_same(path: Path, model: LlamaForCausalLM) -> None:
    checkpoint = open_checkpoint(path)
    loaded = dict(checkpoint.tensors())
    assert list(loaded) == checkpoint.tensor_names()
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, expected[name]), name


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def test_single_file(single: Path, model: LlamaForCausalLM) -> None:
    assert_same(single, model)
    checkpoint = open_checkpoint(single)
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert checkpoint.path == single
    assert checkpoint.config["hidden_size"] == 32
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.generation_config["eos_token_id"] == 2


def test_shards_with_an_index(sharded: Path, model: LlamaForCausalLM) -> None:
    assert_same(sharded, model)


def test_shards_without_an_index(sharded: Path, model: LlamaForCausalLM) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert_same(sharded, model)


def test_a_file_of_another_name(single: Path, model: LlamaForCausalLM) -> None:
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert_same(single, model)


def test_stray_tensors_beside_the_index_are_not_loaded(sharded: Path, model: LlamaForCausalLM) -> None:
    save_file({"model.norm.weight": torch.zeros(32)}, sharded / "adapter.safetensors")
    assert_same(sharded, model)


def test_types_are_kept(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).half(),
        "bf16": torch.randn(4).bfloat16(),
        "ids": torch.arange(7),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for name, tensor in open_checkpoint(tmp_path).tensors():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


def test_no_generation_config(single: Path) -> None:
    (single / "generation_config.json").unlink()
    assert open_checkpoint(single).generation_config == {}


# Damage


def test_missing_shard_is_named(sharded: Path) -> None:
    lost = shards(sharded)[1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"half-downloaded: {lost.name} is missing"):
        open_checkpoint(sharded)


def test_missing_shard_is_named_even_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    lost = shards(sharded)[-1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"half-downloaded: {lost.name} is missing"):
        open_checkpoint(sharded)


def test_a_tensor_the_index_promises_must_be_there(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shards(sharded)[0].name
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"lacks model\.layers\.9\.mlp\.up_proj\.weight"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1000, -1])
def test_truncated_file_is_named(sharded: Path, kept: int) -> None:
    damaged = shards(sharded)[1]
    damaged.write_bytes(damaged.read_bytes()[:kept])
    with pytest.raises(ModelError, match=damaged.name) as caught:
        open_checkpoint(sharded)
    assert "half-downloaded" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"<html>not found</html>" * 10,
        struct.pack("<Q", 20) + b"{'single': 'quotes'}" + bytes(20),
        struct.pack("<Q", 4) + b"[1,]" + bytes(20),
        struct.pack("<Q", 8) + b'{"a": 1}' + bytes(20),
        struct.pack("<Q", 4) + b"\xff\xfe\xff\xfe" + bytes(20),
    ],
    ids=["html", "not json", "not an object", "no offsets", "not utf-8"],
)
def test_corrupt_header_is_named(single: Path, content: bytes) -> None:
    (single / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors.*download it again"):
        open_checkpoint(single)


def test_what_only_the_reader_notices_is_named_too(single: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    checkpoint = open_checkpoint(single)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        list(checkpoint.tensors())


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("a", "b"):
        save_file({"weight": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"weight is in both .*a\.safetensors and .*b\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ['{"half": ', "", "[]", "\x00"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_corrupt_json_is_named(single: Path, name: str, content: str) -> None:
    (single / name).write_text(content)
    with pytest.raises(ModelError, match=name):
        open_checkpoint(single)


def test_corrupt_index_is_named(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": [1, 2]}')
    with pytest.raises(ModelError, match=r"index\.json has no usable 'weight_map'"):
        open_checkpoint(sharded)


def test_bin_weights_say_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"\.bin only; convert.*save_pretrained"):
        open_checkpoint(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        open_checkpoint(tmp_path)


def test_neither_folder_nor_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="check the path"):
        open_checkpoint(tmp_path / "nothing")


def test_tokenizer_comes_from_the_folder(single: Path) -> None:
    backend = Tokenizer(models.WordLevel({"hello": 0, "world": 1}, unk_token="hello"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(single / "tokenizer.json"))
    assert open_checkpoint(single).tokenizer().encode("world hello world") == [1, 0, 1]
