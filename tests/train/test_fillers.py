from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from slipstream.text.tokenizer import Tokenizer
from slipstream.train import prompt_templates
from slipstream.train.fillers import Fillers, filler_words
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
    assert filler_words(tokenizer_of(kind)) == ["harbor", "violin", "Wort"]


def test_a_vocabulary_of_bytes_has_none(tmp_path: Path) -> None:
    tiny_models.write_tokenizer(tmp_path)
    assert filler_words(Tokenizer.from_folder(tmp_path)) == []
    fillers, generator = Fillers([]), random.Random(0)
    assert {fillers.fill(generator, ("A {word}", "Who", "{Word} is"), 2) for _ in range(30)} == {"Who"}


def test_fields_are_filled_and_words_appended() -> None:
    fillers, generator = Fillers(["harbor"]), random.Random(0)
    assert fillers.fill(generator, ("Explain how",), 2) == "Explain how harbor harbor"
    assert fillers.fill(generator, ("Explain how",)) == "Explain how"
    assert fillers.fill(generator, ("Translate: Auf der",), 2) == "Translate: Auf der"
    assert fillers.fill(generator, ("Solve {few}",), 2).removeprefix("Solve ").isdigit()
    assert fillers.fill(generator, ("The {word} of {Word}",), 2) == "The harbor of Harbor"
    numbers = {fillers.fill(generator, ("{number}",)) for _ in range(200)}
    assert len(numbers) > 50 and all(2 <= int(number) <= 3000 for number in numbers)
    assert len({fillers.fill(generator, ("{name} and {name}",)) for _ in range(50)}) > 20


TABLES = {
    "openers": tuple(opener for kind in prompt_templates.OPENERS for opener in kind),
    "plain": prompt_templates.PLAIN_OPENERS,
    "documents": prompt_templates.DOCUMENTS,
    "foreign": prompt_templates.FOREIGN_DOCUMENTS,
    "follow-ups": prompt_templates.FOLLOW_UPS,
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("known", [["violin"], []])
def test_every_template_can_be_filled(name: str, known: list[str]) -> None:
    table, fillers, generator = TABLES[name], Fillers(known), random.Random(0)
    assert len(set(table)) == len(table)
    for template in table:
        assert template == template.rstrip(" ")
        if known or "ord}" not in template:
            assert "{" not in fillers.fill(generator, (template,))
    assert fillers.fill(generator, table)


def test_every_kind_of_request_has_templates_without_words() -> None:
    fillers, generator = Fillers([]), random.Random(0)
    assert all(fillers.fill(generator, kind) for kind in prompt_templates.OPENERS)


def test_tasks_are_about_a_text() -> None:
    for task in (*prompt_templates.LONG_TASKS, *prompt_templates.TRANSLATIONS):
        assert "<<t>>" in task.format(text="<<t>>", question="<<q>>")
    assert all("{" not in question.format(own="x") for question in prompt_templates.QUESTIONS)
