"""Fixtures for what turns text into tokens and back."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.text.text_samples import TEXTS


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
