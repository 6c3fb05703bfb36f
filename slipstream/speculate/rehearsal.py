"""Drafts that no step proposes, compared on the host with the tokens that were collected.

If drafts follow from the text alone, the host has all of their inputs. So while nothing is drafted, acceptance is
estimated while the device is busy: no step proposes or verifies a draft.
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
        """Drafts that a step proposes if the next one verifies ``num_checked``."""
        ...

    def move_in(self, row: int, token_ids: Sequence[int], num_drafts: int) -> None:
        """A request's tokens, a list that grows when they are collected, and its draft limit."""
        ...

    def forget(self) -> None:
        """Drop drafts that are not yet judged: from now on others are verified."""
        ...

    def judge(self, rows: Sequence[int]) -> list[Judged]:
        """Judge by the tokens collected since the last call; of a large batch some requests at a time."""
        ...
