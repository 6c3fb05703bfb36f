"""A grammar over the hash model's tokens, without a library, and threads that are late by any time.

Which tokens are legal is a hash of the tokens before, so a mask of another position, request or step is another mask.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.grammar.interface import Words
from slipstream.structured import StructuredOutput
from tests.sim.hash_model import VOCAB_SIZE

END = 7  # legal in some states only
_MASK = 2**64 - 1


def _scramble(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def structure(seed: int) -> StructuredOutput:
    return StructuredOutput(regex=f"toy {seed}")


def first_state(given: StructuredOutput) -> int:
    assert given.regex is not None
    return _scramble(int(given.regex.split()[1]) + 1)


def next_state(state: int, token_id: int) -> int:
    return _scramble((state * 8191 + token_id) & _MASK)


def legal(state: int) -> set[int]:
    """Most tokens, a few, or one that is certain."""
    share = (0, 1, 3, 6)[state % 4]
    found = {t for t in range(VOCAB_SIZE) if _scramble((state + 127 * t) & _MASK) % 8 < share and t != END}
    if state // 4 % 3 == 0:
        found.add(END)
    return found or {state // 16 % VOCAB_SIZE}


class ToyMatcher:
    def __init__(self, states: Sequence[int]) -> None:
        self._states = list(states)  # one more than tokens taken in

    def consume(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if token_id not in legal(self._states[-1]):
                return count
            self._states.append(next_state(self._states[-1], token_id))
        return len(token_ids)

    def rollback(self, count: int) -> None:
        if count:
            del self._states[-count:]

    def copy(self) -> ToyMatcher:
        return ToyMatcher(self._states)

    error = ""

    @property
    def mask(self) -> Words:
        words = np.zeros(2, dtype=np.uint32)
        for token_id in legal(self._states[-1]):
            words[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words.view(np.int32)


class ToyGrammars:
    def prepare(self) -> None:
        pass

    def compile(self, given: StructuredOutput) -> ToyMatcher:
        return ToyMatcher([first_state(given)])

    def fill(self, places: Sequence[tuple[ToyMatcher, int]], words: Words) -> None:
        for matcher, row in places:
            words[row] = matcher.mask


class _LateTask:
    """Done after so many questions. The work itself happens at once or at the very end."""

    def __init__(self, work: Callable[[], Any], delay: int, is_early: bool) -> None:
        self._work, self._left = work, delay
        self._found: list[Any] = [work()] if is_early else []

    def done(self) -> bool:
        self._left -= 1
        return self._left < 0

    def result(self) -> Any:
        if not self._found:
            self._found.append(self._work())
        return self._found[0]


class LateThreads:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"late {seed}")
        self._most = self._random.choice([0, 1, 2, 6])

    def _begin(self, work: Callable[[], Any]) -> _LateTask:
        return _LateTask(work, self._random.randint(0, self._most), self._random.random() < 0.5)

    def compile(self, work: Callable[[], Any]) -> _LateTask:
        return self._begin(work)

    def fill(self, work: Callable[[], Any]) -> _LateTask:
        return self._begin(work)

    def wait(self, task: Any, timeout_s: float) -> bool:
        return bool(task.done())
