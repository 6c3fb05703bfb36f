"""Random words, names and numbers that fill the fields of prompt templates, so that texts have different subjects.

The words come from the tokenizer's vocabulary, so every model has some in the languages it knows.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from slipstream.text.tokenizer import Tokenizer
from slipstream.train.prompt_templates import NAMES

_LEAST_LETTERS = 4
_WORD_FIELDS = frozenset({"word", "Word"})


def filler_words(tokenizer: Tokenizer) -> list[str]:
    """The words of the vocabulary: tokens that are a space and letters, in the order of their ids."""
    found: dict[str, None] = {}
    for token_id in range(tokenizer.vocab_size):
        # Decoded twice in a row, since some tokenizers drop the space at the beginning of a text.
        first, _, second = tokenizer.decode([token_id, token_id]).strip().partition(" ")
        if first == second and len(first) >= _LEAST_LETTERS and first.isalpha():
            found[first] = None
    return list(found)


class Fillers:
    """Fills the fields of templates: ``{word}``, ``{Word}``, ``{name}``, ``{few}``, ``{number}`` and ``{year}``."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def fill(self, generator: random.Random, templates: Sequence[str], num_words: int = 0) -> str:
        """A random template, filled. Without fields of its own it is followed by ``num_words`` random words.

        Nothing follows a template with a colon, since what it quotes may be in another language.
        """
        usable = templates if self._words else [template for template in templates if not needs_words(template)]
        template = generator.choice(usable)
        filled = template.format_map(_RandomFields(generator, self._words))
        if not self._words or filled != template or ": " in template:
            return filled
        return " ".join([filled, *(generator.choice(self._words) for _ in range(num_words))])


def needs_words(template: str) -> bool:
    """Whether it has a field for a word of the vocabulary."""
    return any(field in _WORD_FIELDS for _, field, _, _ in string.Formatter().parse(template))


class _RandomFields(dict[str, str]):
    """Draws a new value each time a field occurs."""

    def __init__(self, generator: random.Random, words: Sequence[str]) -> None:
        super().__init__()
        self._generator, self._words = generator, words

    def __missing__(self, field: str) -> str:
        if field in _WORD_FIELDS:
            word = self._generator.choice(self._words)
            return word if field == "word" else word[0].upper() + word[1:]
        if field == "name":
            return self._generator.choice(NAMES)
        if field == "year":
            return str(self._generator.randint(1700, 2025))
        if field == "number":
            return str(self._generator.randint(2, self._generator.choice((20, 100, 500, 3000))))
        if field == "few":
            return str(self._generator.randint(2, 30))
        raise KeyError(field)
