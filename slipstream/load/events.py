"""Token events of one stream, counted and timestamped without parsing the ordinary ones.

Server-sent events are lines that begin with ``data:``. JSON has no raw line break, so a line is an event. Ordinary
events are only counted, each as one more piece of text. Events before the first text are parsed, and those with a
finish reason, usage or an error.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

MAX_LINE_BYTES = 4 << 20
# Fields of chat deltas whose text a user would see.
# How servers write a finish reason: JSON with or without a space after the colon.
_END_MARKERS = (b'"finish_reason":"', b'"finish_reason": "')
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


class TokenEvents:
    """What one stream has sent so far.

    ``times`` has the arrival of every event with text, the first included; events of one read share a time.
    """

    __slots__ = (
        "_append_time",
        "_end_marker",
        "_has_text",
        "_rest",
        "failure",
        "is_finished",
        "output_tokens",
        "prompt_tokens",
        "times",
    )

    def __init__(self) -> None:
        self.times = array("d")
        self._append_time = self.times.append
        self.is_finished = False  # the server sent a finish reason or [DONE]
        self.failure: str | None = None
        self.prompt_tokens = -1  # -1: no usage was sent
        self.output_tokens = -1
        self._has_text = False
        self._rest = b""  # an unfinished line
        self._end_marker = _END_MARKERS[0]

    def feed(self, text: bytes, now: float) -> None:
        """Process the next bytes of the stream, which may be cut anywhere."""
        if self._rest:
            text = self._rest + text
            self._rest = b""
        if text[-1:] != b"\n":
            cut = text.rfind(b"\n") + 1
            self._rest = text[cut:]
            text = text[:cut]
            if len(self._rest) > MAX_LINE_BYTES:
                self.failure = f"an event of the stream is longer than {MAX_LINE_BYTES:,} bytes"
            if not text:
                return
        # Inside a JSON string these would have backslashes before their quotes.
        if (
            not self._has_text
            or self._end_marker in text
            or b'"completion_tokens"' in text
            or b'"error"' in text
            or b"[DONE]" in text
        ):
            self._read_lines(text, now)
        elif text.find(b"\n") == len(text) - 2 and text[:5] == b"data:":
            self._append_time(now)
        else:
            self.times.extend((now,) * (text.count(b"\ndata:") + (text[:5] == b"data:")))

    def end(self, now: float) -> None:
        """The stream is over: a last line may lack its line break."""
        if self._rest:
            self.feed(b"\n", now)

    def _read_lines(self, text: bytes, now: float) -> None:
        for line in text.split(b"\n"):
            if line.startswith(b"data:") and self.failure is None:
                self._read_event(line[5:].strip(), now)

    def _read_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_finished = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.failure = f"an event of the stream is not a JSON object: {shown(data)}"
        elif event.get("error"):
            self.failure = f"error in the stream: {error_message(event)}"
        else:
            self._read_usage(event.get("usage"))
            choices = event.get("choices")
            choices = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
            if any(_has_text(choice) for choice in choices):
                self._has_text = True
                self._end_marker = _END_MARKERS[b'"choices": ' in data]
                self.times.append(now)
            if any(choice.get("finish_reason") for choice in choices):
                self.is_finished = True

    def _read_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)


def error_message(body: dict[str, Any]) -> str:
    """The message of an error in OpenAI's format, or in those of other servers."""
    error = body.get("error", body)
    message = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    return shown(str(message).encode())


def shown(data: bytes) -> str:
    """The beginning of what a server sent, on one line."""
    text = " ".join(data[:400].decode(errors="replace").split())
    return text if len(text) <= 160 else text[:159] + "…"


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    return bool(choice.get("text")) or (isinstance(delta, dict) and any(delta.get(name) for name in _TEXT_FIELDS))


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default
