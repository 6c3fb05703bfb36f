"""Damaged model files that once hung for minutes or gave raw errors, at the command line: one line, exit code 2."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slipstream.cli import main
from tests.checkpoints.tiny_gguf import random_state, write_model
from tests.commands.run_cli import Outcome, RunCli, assert_one_line_error
from tests.corruption.gguf_image import Image, Value, nested
from tests.models.heads.tiny_heads import TAPS, eagle3

# A tenth of a second is usual; these once needed minutes.
MAX_SECONDS = 10.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    tokens = [*"abcdefgh", "ab"]
    tokenizer = {"ggml.model": "gpt2", "ggml.tokens": tokens, "ggml.merges": ["a b"], "ggml.eos_token_id": 7}
    return write_model(path, "llama", random_state("llama", 9), tokenizer=tokenizer).read_bytes()


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "broken"))


def generate(cli: RunCli, model: Path, *arguments: object) -> Outcome:
    start = time.process_time()  # process time: other processes may use the machine
    outcome = cli("generate", "abc", "--model", model, "--max-tokens", 3, *arguments)
    assert time.process_time() - start < MAX_SECONDS
    return outcome


def set_value(image: Image, key: bytes, value: Value) -> None:
    image.pairs = [(name, value if name == key else old) for name, old in image.pairs]


def set_number(image: Image, key: bytes, number: int) -> None:
    set_value(image, key, Value(4, number))


def set_rows(image: Image, name: bytes, num_rows: int) -> None:
    next(row for row in image.rows if row.name == name).dims[1] = num_rows


GGUF: dict[str, tuple[Callable[[Image], object], tuple[str, ...]]] = {
    "block_count of 2^32 - 1": (
        lambda i: set_number(i, b"llama.block_count", 0xFFFFFFFF),
        ("model.gguf", "'llama.block_count': 4294967295 is not an integer from 1 to 4096"),
    ),
    "layers that are not there": (
        lambda i: set_number(i, b"llama.block_count", 4096),
        ("model.gguf has weights of 2 layers, its config says 4096",),
    ),
    "rows of q": (
        lambda i: set_rows(i, b"blk.0.attn_q.weight", 100),
        ("q_proj.weight' has shape [100, 64], the config says [128, 64]",),
    ),
    "rows of k": (
        lambda i: set_rows(i, b"blk.1.attn_k.weight", 50),
        ("k_proj.weight' has shape [50, 64], the config says [64, 64]",),
    ),
    "heads of k": (
        lambda i: set_number(i, b"llama.attention.head_count_kv", 3),
        ("4 heads for 3 heads of keys and values",),
    ),
    "arrays 500 deep": (lambda i: i.pairs.append((b"x", nested(500))), ("nests arrays more than 4 deep",)),
    "tokens that are numbers": (
        lambda i: i.pairs.append((b"tokenizer.ggml.token_type", Value(9, [Value(8, b"x")], 8))),
        ("'tokenizer.ggml.token_type': ['x'] is not a list of integers",),
    ),
    "a merge longer than any token": (
        lambda i: set_value(i, b"tokenizer.ggml.merges", Value(9, [Value(8, b"ab c")], 8)),
        ("merges ('ab', 'c') to what is no token",),
    ),
    "an end token that is none": (
        lambda i: set_number(i, b"tokenizer.ggml.eos_token_id", 0xFFFFFFF0),
        ("'tokenizer.ggml.eos_token_id': 4294967280 is not an integer",),
    ),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf_files(cli: RunCli, tmp_path: Path, whole: bytes, name: str) -> None:
    damage, messages = GGUF[name]
    image, path = Image.read(whole), tmp_path / "model.gguf"
    path.write_bytes(image.write())
    assert generate(cli, path).code == 0
    damage(image)
    path.write_bytes(image.write())
    assert_one_line_error(generate(cli, path), *messages)


CONFIGS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "2^40 layers": (
        "config.json",
        {"num_hidden_layers": 1 << 40},
        ("config.json has no valid 'num_hidden_layers': 1099511627776 is not an integer from 1 to 4096",),
    ),
    "4096 layers": ("config.json", {"num_hidden_layers": 4096}, ("weights of 3 layers, its config says 4096",)),
    "architectures": ("config.json", {"architectures": -1}, ("'architectures': -1 is not a list of texts",)),
    "rope_parameters": ("config.json", {"rope_parameters": True}, ("'rope_parameters': True is not an object",)),
    "vocabulary": ("config.json", {"vocab_size": 1 << 24}, ("the config says [16777216, 48]",)),
    "end of sequence": (
        "config.json",
        {"eos_token_id": 1 << 40},
        ("config.json has no valid 'eos_token_id': 1099511627776 is not an integer from 0 to 271",),
    ),
    "another end of sequence": (
        "generation_config.json",
        {"eos_token_id": [2, "x"]},
        ("generation_config.json has no valid 'eos_token_id': [2, 'x']",),
    ),
    "temperature": (
        "generation_config.json",
        {"temperature": "hot"},
        ("generation_config.json: temperature must be a number",),
    ),
    "special token": (
        "tokenizer_config.json",
        {"bos_token": {"content": 5}},
        ("tokenizer_config.json has no valid 'bos_token.content': 5 is not a text",),
    ),
    "half a character": (
        "tokenizer_config.json",
        {"eos_token": "\ud800"},
        ("tokenizer_config.json has no valid 'eos_token'", "valid Unicode"),
    ),
    "added token": (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"300": {"content": 1.5}}},
        ("'added_tokens_decoder.300.content': 1.5 is not a text",),
    ),
    "template": ("tokenizer_config.json", {"chat_template": [1]}, ("'chat_template': [1] is not a text or a list",)),
}


def change(file: Path, **values: object) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **values}))


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(cli: RunCli, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, values, messages = CONFIGS[name]
    change(folder / file, **values)
    monkeypatch.setattr("slipstream.engine.build.build_model", lambda *_: pytest.fail("memory was taken for it"))
    assert_one_line_error(generate(cli, folder), *messages)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_json_100000_deep(cli: RunCli, folder: Path, file: str) -> None:
    (folder / file).write_text('{"a": ' + "[" * 100_000)
    assert_one_line_error(generate(cli, folder), f"{file} is not valid JSON")


def test_a_layer_with_a_number_of_5000_digits(cli: RunCli, folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, f"model.layers.{'9' * 5000}.x": tensors["model.norm.weight"].clone()}, weights)
    outcome = generate(cli, folder)
    assert_one_line_error(outcome, "'model.layers.999", "does not belong to LlamaForCausalLM")
    assert len(outcome.err) < 300


HEADS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "2^40 layers": ({"num_hidden_layers": 1 << 40}, ("'num_hidden_layers': 1099511627776",)),
    "4096 layers": ({"num_hidden_layers": 4096}, ("too few for the 4096 layers of its config",)),
    "feed-forward": ({"intermediate_size": 1 << 20}, ("has shape [48, 56], the config says [48, 1048576]",)),
    "draft vocabulary": ({"draft_vocab_size": 101}, ("has shape [100", "the config says [101")),
    "rope": ({"rope_scaling": True}, ("'rope_scaling': True is not an object",)),
}


@pytest.mark.parametrize("name", HEADS)
def test_draft_heads(cli: RunCli, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values, messages = HEADS[name]
    head = tmp_path / "head"
    head.mkdir()
    eagle3({TAPS: [0, 1, 2]}, body={"max_position_embeddings": 512}).write(head)
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    arguments = ("--speculative-config", json.dumps(config))
    assert generate(cli, tiny_model, *arguments).code == 0
    change(head / "config.json", **values)
    monkeypatch.setattr("slipstream.engine.build.build_model", lambda *_: pytest.fail("memory was taken for it"))
    assert_one_line_error(generate(cli, tiny_model, *arguments), *messages)


def mark_continuations(content: dict[str, Any]) -> None:
    """The mark is cut off the right part of every merge, though here it is longer."""
    content["model"]["vocab"]["ab"] = 300
    content["model"].update(continuing_subword_prefix="x" * 100, merges=[["a", "b"]])


TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    # Native code would panic at the first four: many lines on standard error, and no Exception.
    "merge": (lambda t: t["model"]["merges"].append(["a", "b" * 100]), "to what is no token"),
    "merge as a text": (lambda t: t["model"].update(merges=["a b"]), "merges ('a', 'b') to what is no token"),
    "mark": (mark_continuations, "merges ('a', 'b') to what is no token"),
    "template": (
        lambda t: t.update(post_processor=template("<s>", {})),
        "'post_processor.special_tokens': {} is not an object with the token '<s>'",
    ),
    "deep": (lambda t: t.update(normalizer=json.loads("[" * 500 + "]" * 500)), "is not a valid tokenizer"),
    "ids": (lambda t: t["model"]["vocab"].update(a=1 << 40), "is not a valid tokenizer"),
}


def template(token: str, special_tokens: dict[str, Any]) -> dict[str, Any]:
    pieces = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special_tokens}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    damage, message = TOKENIZERS[name]
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    damage(content)
    file.write_text(json.dumps(content))
    code = main(["generate", "abc", "--model", str(folder)])
    out, err = capfd.readouterr()  # what native code writes as well
    assert_one_line_error(Outcome(code, out, err), "tokenizer.json", message)


def test_a_character_without_a_token(cli: RunCli, folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"] = {"type": "WordLevel", "vocab": {"abc": 0}, "unk_token": "[UNK]"}
    file.write_text(json.dumps(content))
    outcome = cli("generate", "d", "--model", folder, "--raw")
    assert_one_line_error(outcome, "the model's tokenizer cannot encode this text", "Missing [UNK] token")


def test_weights_that_are_no_numbers_leave_nothing_on_standard_output(cli: RunCli, folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, weights)
    assert_one_line_error(generate(cli, folder), "logits that are not numbers")
