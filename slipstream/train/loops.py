"""Where a text has run into a loop, and how much of it is worth keeping.

A small target that repeats itself does so until it is stopped. A head learns in a few rounds that it goes on, and the
rest would only take the place of other texts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

LONGEST_PERIOD = 64
LEAST_KEPT, PERIODS_KEPT = 48, 2  # tokens of a loop, and rounds of it, whichever is more


def end_without_loop(token_ids: Ids) -> int:
    """How many tokens are kept: all, unless the last ones repeat with some period and are more than is kept."""
    length = len(token_ids)
    longest = min(LONGEST_PERIOD, length // PERIODS_KEPT)
    if length <= LEAST_KEPT or not longest:
        return length
    periods = np.arange(1, longest + 1)
    # Backwards, so that a loop is at the beginning. No token is negative: comparisons end where the text does.
    padded = np.full(length + longest, -1, dtype=token_ids.dtype)
    padded[:length] = token_ids[::-1]
    shifted = np.lib.stride_tricks.as_strided(
        padded[1:], (longest, length), (padded.itemsize, padded.itemsize), writeable=False
    )
    repeats = (shifted == padded[:length]).argmin(axis=1)  # tokens that are the one a period before them
    surplus = periods + repeats - np.maximum(LEAST_KEPT, PERIODS_KEPT * periods)
    return length - max(0, int(surplus.max()))
