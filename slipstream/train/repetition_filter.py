"""Cuts off repetition at the end of a text.

A small target that begins to repeat itself does so until it is stopped. A head learns the repetition from a few rounds,
and more of them would only displace other texts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

LONGEST_PERIOD = 64
LEAST_KEPT, PERIODS_KEPT = 48, 2  # tokens and periods of a repetition that are kept, whichever is more


def length_without_repetition(token_ids: Ids) -> int:
    """How many tokens to keep: all, unless the text ends in a repetition that is longer than what is kept of one."""
    length = len(token_ids)
    longest = min(LONGEST_PERIOD, length // PERIODS_KEPT)
    if length <= LEAST_KEPT or not longest:
        return length
    periods = np.arange(1, longest + 1)
    # Reversed, so that the repetition comes first. The padding equals no token, so comparisons stop at the text's end.
    padded = np.full(length + longest, -1, dtype=token_ids.dtype)
    padded[:length] = token_ids[::-1]
    shifted = np.lib.stride_tricks.as_strided(
        padded[1:], (longest, length), (padded.itemsize, padded.itemsize), writeable=False
    )
    repeats = (shifted == padded[:length]).argmin(axis=1)  # tokens that equal the one a period before them
    surplus = periods + repeats - np.maximum(LEAST_KEPT, PERIODS_KEPT * periods)
    return length - max(0, int(surplus.max()))
