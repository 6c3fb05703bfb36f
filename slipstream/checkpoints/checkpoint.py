"""Checkpoints: a config, a tokenizer and a stream of tensors, independent of the file format.

Knows safetensors folders as Hugging Face writes them; GGUF files are in ``gguf``, CTranslate2's in ``ctranslate2``.
Everything is checked on opening, from the headers alone, so that a half-downloaded model fails at once and not after
minutes of loading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from slipstream.checkpoints.safetensors_header import read_header
from slipstream.checkpoints.sentence_transformers import DenseStep, read_dense_steps, read_pooling, read_text_limit
from slipstream.checkpoints.tensor_header import TensorHeader
from slipstream.errors import ModelError
from slipstream.fields import Fields, read_json, read_json_if_present
from slipstream.pooling import PoolingDefaults
from slipstream.text.tokenizer import Tokenizer

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# Names where the layers are saved by themselves, and of what is then missing.
_TRUNK_TENSOR, _OUTPUT_TENSOR = "embed_tokens.weight", "lm_head.weight"
# A decoder with a classifier in place of its logits.
_SCORE_TENSOR, _CLASSIFIER = "score.weight", "ForSequenceClassification"

_SHARD_OF = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


class Checkpoint(Protocol):
    """The interface for loaders. Names of tensors and config keys are Hugging Face's, whatever the file calls them."""

    path: Path
    config: Fields
    generation_config: Fields  # empty if the model has none

    def tensor_headers(self) -> list[TensorHeader]:
        """Headers of what ``tensors`` will return, in the same order."""
        ...

    def tensor_names(self) -> list[str]:
        """Only their names."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor on the CPU, in file order, read on demand; the caller owns its memory."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def pooling_defaults(self) -> PoolingDefaults:
        """How the checkpoint's authors make vectors of texts."""
        ...

    def text_limit(self) -> int | None:
        """The most tokens of a text that its vectors are made for, if the files say so."""
        ...

    @property
    def classifies(self) -> bool:
        """Whether it has a classifier in place of logits."""
        ...

    def read_tensors(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Those of the named tensors that it has, ``tensors`` or not."""
        ...

    def dense_steps(self) -> list[DenseStep]:
        """The dense layers that follow pooling."""
        ...


def open_checkpoint(path: Path, keep_blocks: bool = False) -> Checkpoint:
    """Open a folder with ``config.json``, or a ``.gguf`` file, as ``resolve_model`` gives them.

    With ``keep_blocks`` the weights of the latter stay quantised.
    """
    if path.is_dir():
        if (path / "model.bin").is_file() and not any(path.glob("*.safetensors")):
            from slipstream.checkpoints.ctranslate2 import CTranslate2Checkpoint

            return CTranslate2Checkpoint(path)
        return SafetensorsCheckpoint(path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        from slipstream.checkpoints.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path, keep_blocks)
    raise ModelError(f"{path} is neither a model folder nor a .gguf file; check the path")


class SafetensorsCheckpoint:
    """A folder in Hugging Face's layout: one safetensors file, or shards with an index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation_config = read_json_if_present(path / "generation_config.json")
        self._headers = _tensors_by_file(path)  # file -> its tensors, in file order
        names = {header.name for headers in self._headers.values() for header in headers}
        architecture = next(iter(self.config.texts("architectures")), "")
        self.classifies = architecture.endswith(_CLASSIFIER)
        # Checkpoints for vectors alone are often saved without the class that has the logits.
        self._is_trunk = _TRUNK_TENSOR in names and _OUTPUT_TENSOR not in names
        self._has_logits = not self._is_trunk or self.config.flag("tie_word_embeddings")
        if _SCORE_TENSOR in names and self.classifies:
            self._has_logits = False
            self.config = _as_whole_model(self.config)
        if self._is_trunk:
            self.config = _as_whole_model(self.config)

    def tensor_headers(self) -> list[TensorHeader]:
        headers = [header for headers in self._headers.values() for header in headers if header.name != _SCORE_TENSOR]
        return [header._replace(name=self._whole_name(header.name)) for header in headers]

    def _whole_name(self, name: str) -> str:
        return f"model.{name}" if self._is_trunk else name

    def tensor_names(self) -> list[str]:
        return [header.name for header in self.tensor_headers()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import SafetensorError, safe_open

        for file, headers in self._headers.items():
            try:
                with safe_open(file, framework="pt", device="cpu") as tensors:
                    for header in (header for header in headers if header.name != _SCORE_TENSOR):
                        yield self._whole_name(header.name), tensors.get_tensor(header.name)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read ({error}); download it again") from error

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.path)

    def pooling_defaults(self) -> PoolingDefaults:
        sizes = self.config.integers("matryoshka_dimensions", low=1)
        return replace(
            read_pooling(self.path),
            is_all=not self._has_logits,
            is_matryoshka=self.config.flag("is_matryoshka") or bool(sizes),
            shortened_to=tuple(sizes),
        )

    def text_limit(self) -> int | None:
        return read_text_limit(self.path)

    def read_tensors(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        from safetensors import safe_open

        found, wanted = {}, set(names)
        for file, headers in self._headers.items():
            if here := wanted.intersection(header.name for header in headers):
                with safe_open(file, framework="pt", device="cpu") as tensors:
                    found.update({name: tensors.get_tensor(name) for name in here})
        return found

    def dense_steps(self) -> list[DenseStep]:
        return read_dense_steps(self.path)


def _as_whole_model(config: Fields) -> Fields:
    """What the config of a trunk would say of the model around it. Where there are no weights for logits, embeddings
    are taken in their place, and nothing asks for logits."""
    names = config.texts("architectures")
    endings = ("Model", _CLASSIFIER)
    ending = next((ending for ending in endings for name in names if name.endswith(ending)), "")
    whole = [name.removesuffix(ending) + "ForCausalLM" if ending else name for name in names]
    return config.changed(architectures=whole, tie_word_embeddings=True)


def _tensors_by_file(folder: Path) -> dict[Path, list[TensorHeader]]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return {single: read_header(single)}
    if index.is_file():
        return _read_indexed(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if any(folder.glob("*.bin")):
            raise ModelError(
                f"{folder} holds weights as .bin only; convert them: load the model with transformers and "
                "call save_pretrained(folder), which writes safetensors"
            )
        raise ModelError(f"{folder} holds no *.safetensors file; download the model again")
    _check_all_shards(folder, files)
    return _without_repeats({file: read_header(file) for file in files})


def _read_indexed(folder: Path, index: Path) -> dict[Path, list[TensorHeader]]:
    """The tensors listed in the index, each in the shard it names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{index} has no usable 'weight_map'; download it again")
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise _half_downloaded(folder, missing)
    tensors = {}
    for shard in shards:
        file = folder / shard
        promised = {name for name, home in weight_map.items() if home == shard}
        present = read_header(file)
        if lacking := promised.difference(header.name for header in present):
            raise ModelError(f"{file} lacks {min(lacking)}, which {index.name} promises; download both again")
        tensors[file] = [header for header in present if header.name in promised]
    return tensors


def _check_all_shards(folder: Path, files: list[Path]) -> None:
    """The names of shards without an index still say how many there should be."""
    for file in files:
        if match := _SHARD_OF.search(file.name):
            stem, count = file.name[: match.start()], match[2]
            expected = [f"{stem}-{idx:05d}-of-{count}.safetensors" for idx in range(1, int(count) + 1)]
            if missing := [name for name in expected if not (folder / name).is_file()]:
                raise _half_downloaded(folder, missing)


def _half_downloaded(folder: Path, missing: list[str]) -> ModelError:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return ModelError(f"{folder} is half-downloaded: {missing[0]}{more} is missing; download the model again")


def _without_repeats(tensors: dict[Path, list[TensorHeader]]) -> dict[Path, list[TensorHeader]]:
    home: dict[str, Path] = {}
    for file, headers in tensors.items():
        for name, *_ in headers:
            if name in home:
                raise ModelError(f"{name} is in both {home[name]} and {file}; remove the file that does not belong")
            home[name] = file
    return tensors
