"""Where the last tokens of a text stood before, and what follows from that: on the host, one text at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def latest_longest_match(tokens: NDArray[np.int32], min_match: int, max_match: int) -> int | None:
    """Where the match ends, which is before the last token."""
    last = len(tokens) - 1
    if last < min_match:
        return None
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    # One token more at a time: few positions are left after the first.
    for matched in range(1, max_match):
        longer = ends[ends >= matched]
        longer = longer[tokens[longer - matched] == tokens[last - matched]]
        if longer.size == 0:
            return int(ends[-1]) if ends.size and matched >= min_match else None
        ends = longer
    return int(ends[-1]) if ends.size else None


def copied(tokens: NDArray[np.int32], end: int, count: int) -> NDArray[np.int32]:
    """What stands behind a match. A copy that reaches the text's end goes on with what it has copied."""
    behind: NDArray[np.int32] = tokens[end + 1 + np.arange(count) % (len(tokens) - 1 - end)]
    return behind
