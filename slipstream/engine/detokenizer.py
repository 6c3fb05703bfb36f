"""Text from tokens as they arrive: never half a character, and stop strings found across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Decodes a growing list of tokens by decoding only its end.

    Text of a token can depend on the token before it (spaces, characters spread over several byte tokens), so the end
    is decoded twice, with and without the new tokens, and the difference is the new text.
    """

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._start = 0  # where the decoded window begins
        self._done = 0  # tokens whose text has been emitted

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that is certain now. Bytes of an unfinished character wait for the tokens that finish it."""
        self._token_ids += token_ids
        text = self._new_text()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        """The rest at the end, where an unfinished character shows as the replacement character."""
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._decode(self._token_ids[self._start : self._done])
        return self._decode(self._token_ids[self._start :])[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _advance(self) -> None:
        self._start, self._done = self._done, len(self._token_ids)


class StopStringMatcher:
    """Holds text back while it could still become a stop string."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include  # whether the stop string itself is shown
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Text that is safe to show. After a match ``matched`` is set and the text before the match is returned."""
        if not self._stop:
            return text
        self._held += text
        hits = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if hits:
            at, self.matched = min(hits, key=lambda hit: hit[0])
            return self._held[: at + len(self.matched) * self._include]
        keep = self._longest_open_match()
        safe, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return safe

    def flush(self) -> str:
        safe, self._held = self._held, ""
        return safe

    def _longest_open_match(self) -> int:
        """How many characters at the end are the beginning of a stop string."""
        longest = min(len(self._held), max(len(s) for s in self._stop) - 1)
        for size in range(longest, 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stop):
                return size
        return 0
