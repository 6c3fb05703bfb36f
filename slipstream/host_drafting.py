"""What the scheduler asks of drafting methods on the host, as plain Python.

A method whose drafts follow from the text alone can be rehearsed: its drafts are tried out against the tokens
that came, while no step proposes or checks any. A method that thinks on the host gives its drafts there.
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


class HostProposer(Protocol):
    def propose(self, request_id: str, token_ids: Sequence[int], count: int) -> Sequence[int]:
        """The continuation of these tokens, in the target's vocabulary: up to ``count`` tokens.

        It is called while a step is planned, so it returns what it has: a method that takes long works in its own
        thread. Steps in flight may add tokens that are not among these. So more are requested than a step verifies, and
        the device uses those after the row's tokens, if the ones before equal them.
        """
        ...
