"""CTranslate2's files: written by its format here, and by its own converter where that is installed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.errors import ModelError
from tests.transcription import tiny_whisper
from tests.transcription.tiny_whisper import make_model, save_ctranslate2, save_folder

Model = WhisperForConditionalGeneration


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def check_equals(folder: Path, model: Model, tolerance: float) -> None:
    """The tensors are those of the model, and the config builds the same model."""
    checkpoint = open_checkpoint(folder)
    loaded = dict(checkpoint.tensors())
    assert list(loaded) == checkpoint.tensor_names()
    headers = {header.name: header for header in checkpoint.tensor_headers()}
    assert all((headers[n].shape, headers[n].dtype) == (t.shape, t.dtype) for n, t in loaded.items())
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "proj_out.weight"}
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        largest = expected[name].abs().max()
        torch.testing.assert_close(tensor.float(), expected[name], atol=float(largest) * tolerance, rtol=0, msg=name)
    keys = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "torch_dtype")}
    rebuilt = Model(WhisperConfig(**keys))
    rebuilt.load_state_dict(loaded, strict=False)
    rebuilt.tie_weights()
    features = torch.from_numpy(tiny_whisper.as_features(0))[None]
    tokens = torch.tensor([[257, 258, 262]])
    with torch.inference_mode():
        found, wanted = (m(features, decoder_input_ids=tokens).logits for m in (rebuilt.eval(), model))
    torch.testing.assert_close(found, wanted, atol=1e-4 + 40 * tolerance, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 0.0), (torch.float16, 5e-4), (torch.bfloat16, 4e-3), (torch.int8, 5e-3)],
    ids=str,
)
def test_types(dtype: torch.dtype, tolerance: float, model: Model, tmp_path: Path) -> None:
    save_ctranslate2(tmp_path, model, dtype)
    check_equals(tmp_path, model, tolerance)


@pytest.mark.parametrize(
    ("quantization", "tolerance"), [(None, 0.0), ("float16", 5e-4), ("bfloat16", 4e-3), ("int8", 5e-3), ("int16", 1e-3)]
)
def test_files_of_the_converter(quantization: str | None, tolerance: float, model: Model, tmp_path: Path) -> None:
    converters = pytest.importorskip("ctranslate2.converters")
    source, target = tmp_path / "source", tmp_path / "target"
    save_folder(source, model)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    fast = PreTrainedTokenizerFast.from_pretrained(source)
    assert fast.vocab_size > 0
    generation = json.loads((source / "generation_config.json").read_text())
    generation |= {"lang_to_id": {"<|en|>": 258}, "no_timestamps_token_id": tiny_whisper.NO_TIMESTAMPS}
    (source / "generation_config.json").write_text(json.dumps(generation))
    converter = converters.TransformersConverter(str(source), copy_files=["tokenizer.json"])
    converter.convert(str(target), quantization=quantization)
    check_equals(target, model, tolerance)


def test_generation_config(model: Model, tmp_path: Path) -> None:
    save_ctranslate2(tmp_path, model)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.generation_config.integers("suppress_tokens") == tiny_whisper.SUPPRESSED
    assert checkpoint.generation_config.integers("begin_suppress_tokens") == tiny_whisper.SUPPRESSED_AT_BEGIN
    assert checkpoint.generation_config["eos_token_id"] == tiny_whisper.END
    assert checkpoint.config["decoder_start_token_id"] == tiny_whisper.START
    assert checkpoint.tokenizer().token_id("<|de|>") == tiny_whisper.FIRST_LANGUAGE + 1


# --- damage

SCALARS = {"decoder/activation": torch.tensor(3, dtype=torch.int8)}


def refused(folder: Path, content: bytes) -> str:
    (folder / "model.bin").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message and "model.bin" in message and len(message) < 400
    return message


@pytest.fixture
def folder(tmp_path: Path, model: Model) -> Path:
    save_ctranslate2(tmp_path, model)
    return tmp_path


def test_files_cut_anywhere(folder: Path) -> None:
    content = (folder / "model.bin").read_bytes()
    for length in (0, 3, 4, 10, 17, 30, 60, len(content) // 2, len(content) - 1):
        assert "half-downloaded" in refused(folder, content[:length]), length


def one(name: str, tensor: torch.Tensor) -> bytes:
    return tiny_whisper.write_file({**SCALARS, name: tensor}, {})


DAMAGED: list[tuple[bytes, str]] = [
    (b"\x02" + b"\0" * 99, "its version is 2"),
    (tiny_whisper.write_file({}, {}, "TransformerSpec"), "'TransformerSpec'; only Whisper's"),
    (tiny_whisper.write_file({"decoder/activation": torch.tensor(0, dtype=torch.int8)}, {}), "another activation"),
    (tiny_whisper.write_file(SCALARS, {"a": "b"}), "'a' is an alias of 'b', which is missing"),
    (tiny_whisper.write_file(SCALARS, {"decoder/activation": "decoder/activation"}), "twice"),
    (tiny_whisper.write_file(SCALARS, {}), "lacks decoder/embeddings/weight"),
    (one("decoder/conv9/weight", torch.zeros(2, 2)), "'decoder/conv9/weight', which Whisper does not have"),
    (one("decoder/layer_0/ffn/linear_2/weight", torch.zeros(2, 2)), "which does not fit"),
    (one("decoder/layer_0/attention/linear_1/weight", torch.zeros(3, 2)), "which does not fit"),
    (one("decoder/embeddings/weight", torch.zeros(2, 2, dtype=torch.int8)), "without usable scales"),
    (struct.pack("<I", 6) + struct.pack("<H", 2000), "a name of 2000 bytes"),
    (struct.pack("<IH", 6, 12) + b"WhisperSpec\0" + struct.pack("<II", 3, 1 << 31), "2147483648 entries"),
]


@pytest.mark.parametrize(("content", "reason"), DAMAGED)
def test_damage_is_one_line(content: bytes, reason: str, folder: Path) -> None:
    assert reason in refused(folder, content)


def test_random_bytes_never_surprise(folder: Path) -> None:
    content = bytearray((folder / "model.bin").read_bytes())
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        damaged = bytearray(content)
        places: Any = torch.randint(0, min(4000, len(content)), (3,), generator=generator).tolist()
        for place in places:
            damaged[place] = int(torch.randint(0, 256, (1,), generator=generator))
        (folder / "model.bin").write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(folder)
            assert len(checkpoint.tensor_headers()) == len(checkpoint.tensor_names())
        except ModelError as error:
            assert "\n" not in str(error)
