"""Forms of files and fields (``multipart/form-data``, RFC 7578), parsed as they arrive, within limits.

A part ends where the boundary begins, and nothing is known of its length before. Of what was given but not yet parsed,
no more is kept than may be the begin of a boundary, or the headers of a part.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from slipstream.server.errors import ApiError

_LONGEST_BOUNDARY = 200  # the standard says 70
_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*([\w*-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')
_LONGEST_PADDING = 64  # of spaces between a boundary and its line's end


@dataclass(frozen=True)
class FormLimits:
    max_file_bytes: int
    max_field_bytes: int = 1 << 18
    max_header_bytes: int = 8 << 10  # of a part
    max_parts: int = 64


@dataclass
class FormPart:
    name: str
    file_name: str | None  # None: a field, not a file
    content: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the form's field '{self.name}' is not UTF-8", param=self.name) from error


class _State(enum.Enum):
    PREAMBLE = "before the first boundary"
    BOUNDARY = "after a boundary"
    HEADERS = "in the headers of a part"
    CONTENT = "in a part"
    END = "after the last boundary"


def read_boundary(content_type: bytes | None) -> bytes:
    essence = (content_type or b"").partition(b";")[0].strip().lower()
    if essence != b"multipart/form-data":
        sent = f"'{essence.decode('latin-1')}'" if essence else "no type"
        raise ApiError(415, f"the body must be a form: send 'Content-Type: multipart/form-data', not {sent}")
    match = _BOUNDARY.search(content_type or b"")
    boundary = (match[1] or match[2]) if match else b""
    if not 0 < len(boundary) <= _LONGEST_BOUNDARY:
        raise ApiError(400, "the header Content-Type of a form must have a boundary")
    return boundary


class MultipartParser:
    def __init__(self, boundary: bytes, limits: FormLimits) -> None:
        self.parts: list[FormPart] = []
        self._delimiter = b"\r\n--" + boundary
        self._limits = limits
        self._waiting = bytearray(b"\r\n")  # a boundary may be the first of all
        self._state = _State.PREAMBLE

    def feed(self, data: bytes | memoryview) -> None:
        """The next bytes, however many."""
        if self._state is not _State.END:  # an epilogue means nothing
            self._waiting += data
            while self._advance():
                pass

    def finish(self) -> list[FormPart]:
        """All parts, once everything was given."""
        if self._state is not _State.END:
            raise ApiError(400, f"the form ends {self._state.value}; is it cut off?")
        return self.parts

    def _advance(self) -> bool:
        """Parse what is waiting up to the next state. Returns whether the state changed."""
        before = self._state
        if before is _State.CONTENT or before is _State.PREAMBLE:
            self._read_content()
        elif before is _State.BOUNDARY:
            self._read_boundary_end()
        elif before is _State.HEADERS:
            self._read_headers()
        return self._state is not before

    def _read_content(self) -> None:
        at = self._waiting.find(self._delimiter)
        length = at if at >= 0 else max(0, len(self._waiting) - len(self._delimiter) + 1)
        if self._state is _State.CONTENT:
            self._keep(self.parts[-1], length)
        del self._waiting[: length + (len(self._delimiter) if at >= 0 else 0)]
        if at >= 0:
            self._state = _State.BOUNDARY

    def _keep(self, part: FormPart, length: int) -> None:
        is_file = part.file_name is not None
        most = self._limits.max_file_bytes if is_file else self._limits.max_field_bytes
        if len(part.content) + length > most:
            raise ApiError(413, f"the form's part '{part.name}' is larger than {most} bytes", param=part.name)
        part.content += memoryview(self._waiting)[:length]

    def _read_boundary_end(self) -> None:
        """Two dashes after the last boundary; after another one a line's end, perhaps with spaces before it."""
        if self._waiting.startswith(b"--"):
            self._state = _State.END
            self._waiting.clear()
            return
        end = self._waiting.find(b"\r\n")
        if (end < 0 and len(self._waiting) > _LONGEST_PADDING) or (end > 0 and self._waiting[:end].strip(b" \t")):
            raise ApiError(400, "the form has text after a boundary")
        if end >= 0:
            del self._waiting[:end]
            self._state = _State.HEADERS

    def _read_headers(self) -> None:
        """From the end of the boundary's line, so that a part without headers ends them too."""
        end = self._waiting.find(b"\r\n\r\n")
        if (len(self._waiting) if end < 0 else end) > self._limits.max_header_bytes:
            raise ApiError(400, f"the headers of a form's part are larger than {self._limits.max_header_bytes} bytes")
        if end < 0:
            return
        if len(self.parts) == self._limits.max_parts:
            raise ApiError(400, f"the form has more than {self._limits.max_parts} parts")
        self.parts.append(_read_part(bytes(self._waiting[:end])))
        # The line's end before a boundary that follows at once belongs to it.
        del self._waiting[: end + 2 if self._waiting.startswith(self._delimiter, end + 2) else end + 4]
        self._state = _State.CONTENT


def _read_part(head: bytes) -> FormPart:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition" and value.strip().lower().startswith("form-data"):
            found = {key.lower(): (quoted or plain) for key, quoted, plain in _PARAMETER.findall(value)}
            if own := found.get("name"):
                file_name = found.get("filename", found.get("filename*"))
                return FormPart(_unescape(own), None if file_name is None else _unescape(file_name))
    raise ApiError(400, 'a part of the form has no name; send the header Content-Disposition: form-data; name="..."')


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def parse_form(content_type: bytes | None, body: bytes, limits: FormLimits) -> list[FormPart]:
    parser = MultipartParser(read_boundary(content_type), limits)
    view = memoryview(body)
    for start in range(0, len(body), 1 << 20):  # a second copy of the whole body is never made
        parser.feed(view[start : start + (1 << 20)])
    return parser.finish()
