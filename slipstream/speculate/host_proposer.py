"""Methods that think on the host: what the scheduler asks them before a step, as plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class HostProposer(Protocol):
    def propose(self, request_id: str, token_ids: Sequence[int], count: int) -> Sequence[int]:
        """What comes after these tokens, in the target's vocabulary: as many as ``count``, or fewer.

        It is asked while a step is planned, so it gives what it has: a method that needs long thinks in a thread of its
        own. Steps in flight may bring tokens that are not among these. So more are asked for than a step checks, and
        the device takes those after the tokens that it has by then, if it has come by the others.
        """
        ...
