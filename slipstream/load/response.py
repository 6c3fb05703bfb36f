"""One HTTP/1.1 response, parsed from bytes cut anywhere: chunked, with a length, or ended by the connection."""

from __future__ import annotations

import json
import re

from slipstream.load.events import TokenEvents, error_message, shown

MAX_HEAD_BYTES = 64 << 10
MAX_CHUNK_HEAD_BYTES = 1024
MAX_BODY_BYTES = 64 << 10  # kept to explain a failure

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?")
# What ends the body: the last chunk, a number of bytes, or the end of the connection.
_CHUNKED, _LENGTH, _CLOSE = range(3)


class Response:
    """The response to one request. Once ``is_complete``, ``failure`` says why it does not count, if it does not."""

    __slots__ = (
        "_framing",
        "_has_head",
        "_in_trailer",
        "_is_between_chunks",
        "_is_stream",
        "_left",
        "_rest",
        "body",
        "content_type",
        "events",
        "failure",
        "is_complete",
        "keeps_connection",
        "status",
    )

    def __init__(self) -> None:
        self.events = TokenEvents()
        self.status = 0
        self.content_type = ""
        self.body = bytearray()  # of responses that are not event streams
        self.is_complete = False
        self.keeps_connection = False  # whether another request may follow on it
        self.failure: str | None = None
        self._has_head = False
        self._is_stream = False
        self._framing = _CLOSE
        self._left = 0  # bytes of the body, or of the chunk and its line break, still to come
        self._is_between_chunks = False  # in an event stream, with no partial line
        self._in_trailer = False
        self._rest = b""  # an unfinished head, chunk size line or trailer

    @property
    def has_begun(self) -> bool:
        return self._has_head or bool(self._rest)

    def feed(self, data: bytes, now: float) -> None:
        """Process the next bytes from the connection."""
        if self._is_between_chunks and data[-4:] == b"\n\n\r\n":
            # The fast path at a tenth of the work: one whole chunk. Anything else takes the general path.
            end = data.find(b"\r\n", 0, 16)
            try:
                if int(data[:end], 16) == len(data) - end - 4 > 0:
                    self.events.feed(data[end + 2 : -2], now)
                    if self.events.failure is not None:
                        self._fail(self.events.failure)
                    return
            except ValueError:
                pass
        self._is_between_chunks = False
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not self._has_head:
            after_head = self._read_head(data)
            if after_head is None:
                return
            data = after_head
        if self.is_complete:
            return
        if self._framing == _CHUNKED:
            self._read_chunks(data, now)
        elif self._framing == _LENGTH:
            self._read_length(data, now)
        elif data:
            self._take(data, now)
        if self.events.failure is not None and self.failure is None:
            self._fail(self.events.failure)
        self._is_between_chunks = (
            self._is_stream
            and self._framing == _CHUNKED
            and not (self._left or self._rest or self._in_trailer or self.is_complete)
        )

    def close(self, now: float) -> None:
        """The server closed the connection."""
        if self.is_complete:
            return
        if not self._has_head:
            self._fail("closed before an answer" if not self._rest else _not_http(self._rest))
        elif self._framing == _CLOSE:
            self._complete(now, keeps_connection=False)
        else:
            self._fail("closed before the end of the stream")

    def _read_head(self, data: bytes) -> bytes | None:
        """The bytes after the head; None while the head is incomplete."""
        while True:
            end = data.find(b"\r\n\r\n")
            line = _STATUS_LINE.match(data)
            if line is None and (end >= 0 or len(data) >= 16 or not b"HTTP/1.".startswith(data[:7])):
                self._fail(_not_http(data))
                return None
            if end < 0:
                self._rest = data
                if len(data) > MAX_HEAD_BYTES:
                    self._fail(f"the head of the answer is longer than {MAX_HEAD_BYTES:,} bytes")
                return None
            assert line is not None
            head, data = data[:end], data[end + 4 :]
            self.status = int(line[1])
            if self.status >= 200:  # others, such as 100 Continue, precede the response
                self._read_fields(head)
                return data

    def _read_fields(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self._has_head = True
        connection = fields.get("connection", "").lower()
        self.keeps_connection = "close" not in connection and (
            lines[0].startswith("HTTP/1.1") or "keep-alive" in connection
        )
        self.content_type = fields.get("content-type", "").partition(";")[0].strip().lower()
        self._is_stream = self.status == 200 and self.content_type == "text/event-stream"
        length = fields.get("content-length", "")
        if "chunked" in fields.get("transfer-encoding", "").lower():
            self._framing = _CHUNKED
        elif self.status in (204, 304):
            self._framing = _LENGTH
        elif length.isascii() and length.isdigit():
            self._framing, self._left = _LENGTH, int(length)
        elif length:
            self._fail(f"the answer's Content-Length is no number: {shown(length.encode())}")

    def _read_chunks(self, data: bytes, now: float) -> None:
        position, size, texts = 0, len(data), []
        left = self._left
        while position < size and not self._in_trailer:
            if not left:
                end = data.find(b"\r\n", position)
                if end < 0:
                    self._rest = data[position:]
                    if len(self._rest) > MAX_CHUNK_HEAD_BYTES:
                        self._fail(f"a chunk has no length: {shown(self._rest)}")
                    break
                try:
                    left = int(data[position:end], 16)
                except ValueError:
                    left = _chunk_size(data[position:end])
                if left < 0:
                    self._fail(f"a chunk has no length: {shown(data[position:end])}")
                    return
                position = end + 2
                if not left:
                    self._in_trailer = True
                    break
                left += 2  # the line break after it
            stop = position + left
            if stop <= size:
                texts.append(data[position : max(position, stop - 2)])
                left, position = 0, stop
            else:
                texts.append(data[position : max(position, stop - 2)])
                left, position = stop - size, size
        self._left = left
        text = texts[0] if len(texts) == 1 else b"".join(texts)
        if text:
            self._take(text, now)
        if self._in_trailer:
            self._read_trailer(data[position:], now)

    def _read_trailer(self, data: bytes, now: float) -> None:
        """Skip fields after the last chunk, up to the empty line."""
        if data.startswith(b"\r\n"):
            self._complete(now, keeps_connection=len(data) == 2)
        elif (end := data.find(b"\r\n\r\n")) >= 0:
            self._complete(now, keeps_connection=len(data) == end + 4)
        elif len(data) > MAX_HEAD_BYTES:
            self._fail(f"the trailer of the answer is longer than {MAX_HEAD_BYTES:,} bytes")
        else:
            self._rest = data

    def _read_length(self, data: bytes, now: float) -> None:
        text = data[: self._left]
        self._left -= len(text)
        if text:
            self._take(text, now)
        if not self._left:
            self._complete(now, keeps_connection=len(text) == len(data))

    def _take(self, text: bytes, now: float) -> None:
        if self._is_stream:
            self.events.feed(text, now)
        else:
            self.body += text[: MAX_BODY_BYTES - len(self.body)]

    def _complete(self, now: float, *, keeps_connection: bool) -> None:
        self.is_complete = True
        self.events.end(now)
        # Bytes after the response belong to no request: the connection is not used again.
        self.keeps_connection = self.keeps_connection and keeps_connection
        if self.failure is None:
            self.failure = self.events.failure or self._fault()

    def _fault(self) -> str | None:
        """Why a complete response is not a stream that ended normally; None if it is."""
        if self.status != 200:
            return f"HTTP {self.status}: {self._error_text()}"
        if not self._is_stream:
            kind = self.content_type or "no type"
            return f"the answer is no stream of events: {kind}: {shown(bytes(self.body))}"
        return None if self.events.is_finished else "the stream ended without a reason or [DONE]"

    def _error_text(self) -> str:
        try:
            body = json.loads(bytes(self.body))
        except ValueError:
            return shown(bytes(self.body))
        return error_message(body) if isinstance(body, dict) else shown(bytes(self.body))

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.is_complete = True
        self.keeps_connection = False


def _chunk_size(line: bytes) -> int:
    """The size in a chunk's first line, which may have extensions; -1 if it has none."""
    size = line.partition(b";")[0].strip()
    return int(size, 16) if re.fullmatch(rb"[0-9a-fA-F]{1,15}", size) else -1


def _not_http(data: bytes) -> str:
    return f"the answer is not HTTP/1.1: {shown(data)}"
