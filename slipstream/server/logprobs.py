"""Log probabilities in the API's format: each token by a unique name, with its bytes and the offset of its text.

A token may be part of a character. It has no text then, and is named by its bytes as OpenAI does: ``bytes:\\xe2\\x80``.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from slipstream.output import Logprob, Logprobs
from slipstream.server.protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from slipstream.text.detokenizer import IncrementalDetokenizer
from slipstream.text.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no infinity


class TextOffsets:
    """The offset of each token in a choice's text, in characters.

    A token that begins in the middle of a character has the offset of that character. Offsets refer to the text as
    returned: a special token that is left out, or a space that a tokenizer strips, takes no room.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._num_shown = 0
        # The detokenizer waits for whole characters; the text before an unfinished one is counted from the bytes.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_waiting = 0

    def add(self, token_id: int) -> int:
        """Take the next token; returns the offset of its text."""
        offset = self._num_shown + self._num_waiting
        if self._tokenizer.decode([token_id], self._skip_special_tokens):
            raw = self._tokenizer.token_bytes(token_id)
            unfinished = self._utf8.getstate()[0]
            if unfinished and not _is_utf8_so_far(unfinished + raw[:1]):
                offset += 1  # never completed: it becomes a replacement character before this token
            self._num_waiting += len(self._utf8.decode(raw))
        if text := self._detokenizer.add([token_id]):
            self._num_shown += len(text)
            self._num_waiting = 0
        return offset


def _is_utf8_so_far(raw: bytes) -> bool:
    try:
        codecs.utf_8_decode(raw, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


def chat_logprobs(entries: Sequence[Logprobs], tokenizer: Tokenizer, num_top: int) -> ChatLogprobs:
    def describe(token_id: int, logprob: Logprob) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        return TopLogprob(token=_name_bytes(raw), logprob=_finite(logprob.logprob), bytes=list(raw))

    content = []
    for entry in entries:
        chosen = describe(*next(iter(entry.items())))
        likeliest = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
        top = [describe(token_id, logprob) for token_id, logprob in likeliest]
        content.append(TokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


def completion_logprobs(entries: Sequence[Logprobs], tokenizer: Tokenizer, offsets: TextOffsets) -> CompletionLogprobs:
    """``offsets`` has processed the tokens before these."""
    tops = [_by_name(entry, tokenizer) for entry in entries]
    return CompletionLogprobs(
        tokens=[next(iter(top)) for top in tops],
        token_logprobs=[next(iter(top.values())) for top in tops],
        top_logprobs=tops,
        text_offset=[offsets.add(next(iter(entry))) for entry in entries],
    )


def _by_name(entry: Logprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The chosen token first. Of tokens with the same bytes, such as ``<0x0A>`` and a line break, all but the first are
    named by their ids, so that none is lost."""
    named: dict[str, float] = {}
    for token_id, logprob in entry.items():
        name = _name_bytes(tokenizer.token_bytes(token_id))
        named[f"token_id:{token_id}" if name in named else name] = _finite(logprob.logprob)
    return named


def _name_bytes(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _FLOOR
