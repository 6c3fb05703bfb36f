"""Words, names and numbers that give texts their subjects, drawn at random.

The words are the tokenizer's own, so every model has some in the languages it knows, and no list of ours is needed.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from slipstream.models.tokenizer import Tokenizer
from slipstream.train.phrases import NAMES

_LEAST_LETTERS = 4
_OF_WORDS = frozenset({"word", "Word"})


def words_of(tokenizer: Tokenizer) -> list[str]:
    """Those of the vocabulary: tokens that are a space and letters, in the order of their ids."""
    found: dict[str, None] = {}
    for token_id in range(tokenizer.vocab_size):
        # Twice, for some tokenizers drop the space at the beginning of a text.
        first, _, second = tokenizer.decode([token_id, token_id]).strip().partition(" ")
        if first == second and len(first) >= _LEAST_LETTERS and first.isalpha():
            found[first] = None
    return list(found)


class Words:
    """Fills the places of phrases: ``{word}``, ``{Word}``, ``{name}``, ``{few}``, ``{number}`` and ``{year}``."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def phrase(self, generator: random.Random, phrases: Sequence[str], num_words: int = 0) -> str:
        """One of them that can be filled, with random words behind it if it has no places of its own.

        A phrase that has begun to quote something, as behind a colon, goes on without: it may be in another language.
        """
        phrase = generator.choice(phrases if self._words else [phrase for phrase in phrases if not has_words(phrase)])
        filled = phrase.format_map(_Drawn(generator, self._words))
        if not self._words or filled != phrase or ": " in phrase:
            return filled
        return " ".join([filled, *(generator.choice(self._words) for _ in range(num_words))])


def has_words(phrase: str) -> bool:
    """Whether it has a place for a word of the vocabulary."""
    return any(place in _OF_WORDS for _, place, _, _ in string.Formatter().parse(phrase))


class _Drawn(dict[str, str]):
    """Draws anew for every place."""

    def __init__(self, generator: random.Random, words: Sequence[str]) -> None:
        super().__init__()
        self._generator, self._words = generator, words

    def __missing__(self, place: str) -> str:
        if place in _OF_WORDS:
            word = self._generator.choice(self._words)
            return word if place == "word" else word[0].upper() + word[1:]
        if place == "name":
            return self._generator.choice(NAMES)
        if place == "year":
            return str(self._generator.randint(1700, 2025))
        if place == "number":
            return str(self._generator.randint(2, self._generator.choice((20, 100, 500, 3000))))
        if place == "few":
            return str(self._generator.randint(2, 30))
        raise KeyError(place)
