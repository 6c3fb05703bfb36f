"""Methods that draft on the host: the interface for the scheduler, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class HostProposer(Protocol):
    def propose(self, request_id: str, token_ids: Sequence[int], count: int) -> Sequence[int]:
        """The continuation of these tokens, in the target's vocabulary: up to ``count`` tokens.

        It is called while a step is planned, so it returns what it has: a method that takes long works in its own
        thread. Steps in flight may add tokens that are not among these. So more are requested than a step verifies, and
        the device uses those after the row's tokens, if the ones before equal them.
        """
        ...
