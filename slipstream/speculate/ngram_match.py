"""Earlier occurrences of the last tokens of a text and their continuation, on the host, one text at a time."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

_FEW = 16  # positions that are compared one by one, which is faster if one of them has the maximum length


def latest_longest_match(tokens: NDArray[np.int32], min_match: int, max_match: int) -> int | None:
    """The end of the match, which is before the last token."""
    last = len(tokens) - 1
    if last < min_match:
        return None
    ends = (tokens[:last] == tokens[last]).nonzero()[0]
    latest: list[int] = ends[-_FEW:].tolist()
    found, longest = None, min_match - 1
    for end in reversed(latest):
        length = 1
        while length < max_match and end >= length and tokens[end - length] == tokens[last - length]:
            length += 1
        if length > longest:
            found, longest = end, length
            if length == max_match:
                return found
    return found if len(ends) <= _FEW else _of_many(tokens, ends, min_match, max_match)


def _of_many(tokens: NDArray[np.int32], ends: NDArray[np.int64], min_match: int, max_match: int) -> int | None:
    """One more token at a time: few positions are left after the first."""
    last = len(tokens) - 1
    for matched in range(1, max_match):
        longer = ends[ends >= matched]
        longer = longer[tokens[longer - matched] == tokens[last - matched]]
        if longer.size == 0:
            return int(ends[-1]) if matched >= min_match else None
        ends = longer
    return int(ends[-1])


def copied(tokens: NDArray[np.int32], end: int, count: int) -> list[int]:
    """The tokens after a match. A copy that reaches the end of the text continues with what it has copied."""
    following: list[int] = tokens[end + 1 : end + 1 + count].tolist()
    return following if len(following) == count else list(itertools.islice(itertools.cycle(following), count))
