"""Fixtures for what reads model files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from .fake_index import FakeIndex, make_index
from .text_samples import TEXTS

if TYPE_CHECKING:
    import gguf


@pytest.fixture(scope="session")
def smollm2_reader(smollm2_path: Path) -> gguf.GGUFReader:
    """The default model's file as the ``gguf`` package reads it, which takes it two seconds."""
    import gguf

    return gguf.GGUFReader(smollm2_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of models, and no way to the hub."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


@pytest.fixture
def index(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    return make_index(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small byte-level vocabulary with merges across all kinds of characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # Short pieces, so that merges cross digits, spaces and punctuation and the split rule decides whether they apply.
    corpus = [text[start : start + 6] for text in TEXTS for start in range(0, len(text), 3)]
    backend.train_from_iterator(corpus * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]
