"""What the engine asks of a library of grammars, and of the threads that its work runs in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.structured import StructuredOutput

Words = npt.NDArray[np.int32]  # masks: bit t % 32 of word t // 32 allows token t


class Matcher(Protocol):
    """One request's place in its grammar. Used by one thread at a time."""

    def consume(self, token_ids: Sequence[int]) -> int:
        """Go on by these tokens, up to the first that is not legal; returns how many were.

        A token that ends the text need not be taken in: nothing follows it.
        """
        ...

    def rollback(self, count: int) -> None:
        """Return to where it was before the last ``count`` tokens."""
        ...

    def copy(self) -> Matcher: ...

    @property
    def error(self) -> str:
        """Why it cannot go on, such as a limit on its work; empty while it can."""
        ...


class GrammarBackend(Protocol):
    """A library of grammars over one vocabulary."""

    def prepare(self) -> None:
        """Whatever it does once. Without this call the first grammar does it."""
        ...

    def compile(self, structure: StructuredOutput) -> Matcher:
        """A matcher at the beginning; raises ``RequestError`` for what cannot be enforced."""
        ...

    def fill(self, places: Sequence[tuple[Any, int]], words: Words) -> None:
        """The mask of each matcher's next token, into the row of ``words`` beside it."""
        ...


class Task(Protocol):
    """Work that was given to a thread."""

    def done(self) -> bool: ...

    def result(self) -> Any:
        """What the work returned; raises what it raised."""
        ...


class Threads(Protocol):
    """Where grammars are compiled and masks are filled."""

    def compile(self, work: Callable[[], Any]) -> Task: ...

    def fill(self, work: Callable[[], Any]) -> Task:
        """One at a time, in order."""
        ...

    def wait(self, task: Task, timeout_s: float) -> bool:
        """Whether the task is done, at the latest after this time."""
        ...
