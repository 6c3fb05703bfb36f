"""What servers send, written out by hand: heads, chunks and events in the forms that are met."""

from __future__ import annotations

import json
from typing import Any

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
ROLE: dict[str, Any] = {"role": "assistant", "content": ""}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(content: dict[str, Any], *, spaced: bool = False, line_break: str = "\n") -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=None if spaced else (",", ":"))
    return f"data: {text}{line_break}{line_break}".encode()


def chat(delta: dict[str, Any] | str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {"content": delta} if isinstance(delta, str) else delta
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice], **more}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    total = prompt_tokens + completion_tokens
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
    return {"id": "chatcmpl-1", "choices": [], "usage": counts}


def plain(status: str, body: bytes, *fields: str) -> bytes:
    """A response with a length."""
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: application/json", *fields]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
