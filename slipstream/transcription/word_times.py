"""The times of words, from where a speech model's decoder looks while it reads its own text.

The heads that follow the speech look at one place after the other. The path through their weights that does so, and
has the largest sum, gives every token a time (Whisper's own method: median filter, dynamic time warping, punctuation
with the word it belongs to).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from slipstream.text.tokenizer import Tokenizer

_FILTER_WIDTH = 7  # entries of the encoder's output, each a fiftieth of a second
_SECONDS_AN_ENTRY = 0.02
_WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
_WIDE = "\uff0c\uff01\uff1f\uff1a"  # comma, exclamation mark, question mark, colon
_BEFORE = "\"'\u201c\u00bf([{-"  # punctuation that belongs to the next word
_AFTER = f"\"'.\u3002,!?:\u201d)]}}\u3001{_WIDE}"  # and to the one before
_SENTENCE_ENDS = ".\u3002!?\uff01\uff1f"
_LONGEST_WORD_S, _LONGEST_IN_MEDIANS = 0.7, 2.0  # of a word at a sentence's end or begin: beyond, it is a pause


@dataclass(slots=True)
class TokenWord:
    """A word as a range of a text's tokens."""

    text: str
    num_tokens: int
    start: float = 0.0
    end: float = 0.0


Weights = npt.NDArray[np.float32]


def time_words(
    weights: Weights,  # [num_heads, num_tokens, num_entries]: of the text as the decoder reads it
    first: int,  # the row that predicts the text's first token; the one that predicts its end is the last but one
    words: Sequence[TokenWord],  # all of the text, in order
) -> None:
    """Gives the words their times, from the window's begin."""
    starts = _start_entries(_sharpen(weights)[first:-1]) * _SECONDS_AN_ENTRY
    token = 0
    for word in words:
        word.start, word.end = float(starts[token]), float(starts[token + word.num_tokens])
        token += word.num_tokens


def _sharpen(weights: Weights) -> Weights:
    """One number for each token and entry: how much more heads look there for this token than for others."""
    spread = weights.std(axis=1, keepdims=True)
    centred = (weights - weights.mean(axis=1, keepdims=True)) / np.where(spread == 0, 1, spread)
    half = _FILTER_WIDTH // 2
    if centred.shape[2] > half:
        padded = np.pad(centred, ((0, 0), (0, 0), (half, half)), mode="reflect")
        centred = np.median(np.lib.stride_tricks.sliding_window_view(padded, _FILTER_WIDTH, axis=2), axis=3)
    mean: Weights = centred.mean(axis=0)
    return mean


def _start_entries(gain: Weights) -> npt.NDArray[np.int64]:
    """The entry at which each token begins, on the monotonic path of the largest sum: [num_tokens + 1]."""
    path = find_path(gain)
    tokens, entries = path[:, 0], path[:, 1]
    is_first = np.diff(tokens, prepend=-1) > 0
    return entries[is_first]


def find_path(gain: Weights) -> npt.NDArray[np.int64]:
    """Dynamic time warping: pairs (row, column) from the first to the last, each step to the next row, column or both.

    Where steps are equally good, the one to the next column alone is taken.
    """
    num_rows, num_columns = gain.shape
    best = np.full((num_rows + 1, num_columns + 1), -np.inf)
    best[0, 0] = 0.0
    step = np.zeros((num_rows + 1, num_columns + 1), dtype=np.int8)
    # Diagonals: a cell depends on the two before its own alone.
    for diagonal in range(2, num_rows + num_columns + 1):
        rows = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        columns = diagonal - rows
        both, row, column = best[rows - 1, columns - 1], best[rows - 1, columns], best[rows, columns - 1]
        choice = np.where((both > row) & (both > column), 0, np.where((row > both) & (row > column), 1, 2))
        best[rows, columns] = np.choose(choice, (both, row, column)) + gain[rows - 1, columns - 1]
        step[rows, columns] = choice
    path, at_row, at_column = [], num_rows, num_columns
    while at_row > 0 and at_column > 0:
        path.append((at_row - 1, at_column - 1))
        last = step[at_row, at_column]
        at_row -= last != 2
        at_column -= last != 1
    return np.array(path[::-1], dtype=np.int64)


def split_words(token_ids: Sequence[int], tokenizer: Tokenizer, language: str) -> list[TokenWord]:
    """Words begin with a space; in languages written without them, every piece of whole characters is one."""
    words: list[TokenWord] = []
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        text = tokenizer.decode(pending)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue  # half of a character: the rest is in the next token
        is_mark = text.strip() in string.punctuation
        if language in _WITHOUT_SPACES or text.startswith(" ") or is_mark or not words:
            words.append(TokenWord(text, len(pending)))
        else:
            words[-1].text += text
            words[-1].num_tokens += len(pending)
        pending = []
    if pending:
        words.append(TokenWord(tokenizer.decode(pending), len(pending)))
    return words


def limit_words_at_pauses(words: Sequence[TokenWord]) -> None:
    """A word at a sentence's end or begin that is far longer than others has a pause in it, which is cut off."""
    durations = [word.end - word.start for word in words if word.end > word.start]
    longest = _LONGEST_IN_MEDIANS * min(_LONGEST_WORD_S, float(np.median(durations)) if durations else 0.0)
    for before, word in pairwise(words):
        if word.end - word.start > longest:
            if word.text.strip() in _SENTENCE_ENDS:
                word.end = word.start + longest
            elif before.text.strip() in _SENTENCE_ENDS:
                word.start = word.end - longest


def merge_punctuation(words: Sequence[TokenWord]) -> list[TokenWord]:
    """Each mark with the word that it belongs to, with that word's times."""
    merged: list[TokenWord] = []
    opening: list[TokenWord] = []
    for word in words:
        bare = word.text.strip()
        if word.text.startswith(" ") and bare and bare in _BEFORE:
            opening.append(word)
        elif merged and not opening and not word.text.startswith(" ") and bare and bare in _AFTER:
            merged[-1].text += word.text
            merged[-1].num_tokens += word.num_tokens
        else:
            for mark in reversed(opening):
                word.text = mark.text + word.text
                word.num_tokens += mark.num_tokens
            opening = []
            merged.append(word)
    return merged + opening
