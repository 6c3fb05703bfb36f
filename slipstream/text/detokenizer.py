"""Incremental detokenisation: never half a character, and stop strings found across token borders."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.text.token_bytes import TokenTable

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so up to three replacement characters at the end may still become another one.
_MOST_OPEN = 3
_MOST_PENDING = 16  # tokens without final text, after which the part that cannot change any more is shown
_NUM_KEPT = 16  # tokens kept then: more than the bytes of three unfinished characters and one cut in two


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer(Protocol):
    def add(self, token_ids: Sequence[int]) -> str:
        """Text that is final. Bytes of an unfinished character wait for the tokens that complete it."""
        ...

    def flush(self) -> str:
        """The rest at the end, where an unfinished character becomes the replacement character."""
        ...


def open_detokenizer(decoder: Decoder, skip_special_tokens: bool = True) -> Detokenizer:
    """The cheapest detokenizer whose pieces add up to what ``decoder`` gives for the whole text."""
    tables: Callable[[bool], TokenTable | None] | None = getattr(decoder, "token_table", None)
    table = None if tables is None else tables(skip_special_tokens)
    return IncrementalDetokenizer(decoder, skip_special_tokens) if table is None else ByteDetokenizer(table)


class ByteDetokenizer:
    """For vocabularies whose tokens have the same bytes everywhere: most tokens cost one table lookup."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_open = False  # whether the decoder holds bytes of an unfinished character

    def add(self, token_ids: Sequence[int]) -> str:
        if not self._is_open and len(token_ids) == 1 and (text := self._table.texts[token_ids[0]]) is not None:
            return text
        text = self._utf8.decode(b"".join(map(self._table.raw.__getitem__, token_ids)))
        self._is_open = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        self._is_open = False
        return self._utf8.decode(b"", final=True)


class IncrementalDetokenizer:
    """Decodes a growing list of tokens by decoding only its end.

    The text of a token can depend on the tokens before it (spaces, characters spread over several byte tokens), so new
    tokens are decoded together with the last ones whose text was returned, and the difference is the new text. The
    window is bounded, so the cost of a text is linear in its length, whatever its bytes are.
    """

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # the last tokens whose text was returned, then pending ones
        self._num_pending = 0
        self._num_shown = 0  # characters of the window's text that were returned

    def add(self, token_ids: Sequence[int]) -> str:
        self._window += token_ids
        self._num_pending += len(token_ids)
        text = self._decode(self._window)
        new = text[self._num_shown :]
        if new and not new.endswith(_INCOMPLETE):
            self._show(self._num_pending, num_open=0)
            return new
        if self._num_pending <= _MOST_PENDING:
            return ""
        return self._give_up_waiting(new)

    def flush(self) -> str:
        new = self._decode(self._window)[self._num_shown :]
        self._show(self._num_pending, num_open=0)
        return new

    def _give_up_waiting(self, new: str) -> str:
        """Many tokens have produced no final text. All but the last few characters cannot change any more."""
        if not new:
            # They have no text, as special tokens that are skipped, and are dropped from the window.
            del self._window[-self._num_pending :]
            self._num_pending = 0
            return ""
        num_open = min(_MOST_OPEN, len(new) - len(new.rstrip(_INCOMPLETE)))
        self._window = [token_id for token_id in self._window if self._decode([token_id])]
        self._show(_NUM_KEPT, num_open)
        return new[: len(new) - num_open]

    def _show(self, num_kept: int, num_open: int) -> None:
        """Return all text but the last characters; keep the last tokens, since the next one's text depends on them."""
        if num_kept:
            del self._window[:-num_kept]
            self._num_shown = len(self._decode(self._window)) - num_open
        self._num_pending = 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStringMatcher:
    """Withholds text while it could still become a stop string."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include  # whether the stop string itself is returned
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Text that is safe to return. After a match ``matched`` is set and only the text before it is returned."""
        if not self._stop:
            return text
        self._held += text
        hits = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if hits:
            at, self.matched = min(hits, key=lambda hit: hit[0])
            return self._held[: at + len(self.matched) * self._include]
        keep = max(map(self._length_of_open_match, self._stop))
        safe, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return safe

    def flush(self) -> str:
        safe, self._held = self._held, ""
        return safe

    def _length_of_open_match(self, stop: str) -> int:
        """How many characters at the end are a prefix of this stop string."""
        held = self._held
        at = held.find(stop[0], max(0, len(held) - len(stop) + 1))
        while at >= 0 and not stop.startswith(held[at:]):
            at = held.find(stop[0], at + 1)
        return len(held) - at if at >= 0 else 0
