"""Drafts that no step proposes, tried out on the host against the tokens that came.

Where drafts follow from the text alone the host has all there is to them. So while nothing is drafted, what drafts
would be worth is known while the device is busy: no step proposes one, none checks one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Judged(NamedTuple):
    """Of a row's draft: places that were judged before, that are accepted, and that are judged now."""

    row: int
    num_before: int
    num_right: int
    num_judged: int


class Rehearsal(Protocol):
    def num_proposed(self, num_checked: int) -> int:
        """Drafts that a step proposes, where the next one checks so many."""
        ...

    def move_in(self, row: int, token_ids: Sequence[int], num_drafts: int) -> None:
        """A request's tokens, a list that grows as they are collected, and how many drafts it may have."""
        ...

    def forget(self) -> None:
        """Drafts that are not yet judged: from now on others are checked."""
        ...

    def judge(self, rows: Sequence[int]) -> list[Judged]:
        """By the tokens that have come since it was last asked; of a large batch some at a time."""
        ...
