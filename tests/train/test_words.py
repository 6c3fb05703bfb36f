from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from slipstream.models.tokenizer import Tokenizer
from slipstream.train import phrases
from slipstream.train.words import Words, words_of
from tests import tiny_models

PIECES = ("harbor", "_harbor", "_violin", "_ten", "_x86a", "_Wort", "ing", "_", "_two_words")


def tokenizer_of(kind: str) -> Tokenizer:
    """Vocabularies that write the space in front of a word as GPT-2's does, and as SentencePiece's."""
    mark = "Ġ" if kind == "bytes" else "▁"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if kind == "bytes" else []
    tokens = list(dict.fromkeys([*alphabet, *(piece.replace("_", mark) for piece in PIECES)]))
    backend = Backend(models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel() if kind == "bytes" else decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, named_tokens={"bos_token": "<s>"})


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_words_of_a_vocabulary(kind: str) -> None:
    assert words_of(tokenizer_of(kind)) == ["harbor", "violin", "Wort"]


def test_a_vocabulary_of_bytes_has_none(tmp_path: Path) -> None:
    tiny_models.write_tokenizer(tmp_path)
    assert words_of(Tokenizer.from_folder(tmp_path)) == []
    words, generator = Words([]), random.Random(0)
    assert {words.phrase(generator, ("A {word}", "Who", "{Word} is"), 2) for _ in range(30)} == {"Who"}


def test_places_are_filled_and_words_put_behind() -> None:
    words, generator = Words(["harbor"]), random.Random(0)
    assert words.phrase(generator, ("Explain how",), 2) == "Explain how harbor harbor"
    assert words.phrase(generator, ("Explain how",)) == "Explain how"
    assert words.phrase(generator, ("Translate: Auf der",), 2) == "Translate: Auf der"
    assert words.phrase(generator, ("Solve {few}",), 2).removeprefix("Solve ").isdigit()
    assert words.phrase(generator, ("The {word} of {Word}",), 2) == "The harbor of Harbor"
    numbers = {words.phrase(generator, ("{number}",)) for _ in range(200)}
    assert len(numbers) > 50 and all(2 <= int(number) <= 3000 for number in numbers)
    assert len({words.phrase(generator, ("{name} and {name}",)) for _ in range(50)}) > 20


TABLES = {
    "openers": tuple(opener for kind in phrases.OPENERS for opener in kind),
    "plain": phrases.PLAIN_OPENERS,
    "documents": phrases.DOCUMENTS,
    "foreign": phrases.FOREIGN_DOCUMENTS,
    "follow-ups": phrases.FOLLOW_UPS,
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("known", [["violin"], []])
def test_every_phrase_can_be_filled(name: str, known: list[str]) -> None:
    table, words, generator = TABLES[name], Words(known), random.Random(0)
    assert len(set(table)) == len(table)
    for phrase in table:
        assert phrase == phrase.rstrip(" ")
        if known or "ord}" not in phrase:
            assert "{" not in words.phrase(generator, (phrase,))
    assert words.phrase(generator, table)


def test_every_kind_of_request_can_do_without_words() -> None:
    words, generator = Words([]), random.Random(0)
    assert all(words.phrase(generator, kind) for kind in phrases.OPENERS)


def test_tasks_are_about_a_text() -> None:
    for task in (*phrases.LONG_TASKS, *phrases.TRANSLATIONS):
        assert "<<t>>" in task.format(text="<<t>>", question="<<q>>")
    assert all("{" not in question.format(own="x") for question in phrases.QUESTIONS)
