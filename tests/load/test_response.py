from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.load import response as module
from slipstream.load.response import Response
from tests.load.test_events import split
from tests.load.wire import DONE, LAST_CHUNK, ROLE, STREAM_HEAD, chat, chunk, event, plain, usage

EVENTS = [event(chat(ROLE)), event(chat(" a")), event(chat(" b")), event(chat({}, "length")), event(usage(5, 2)), DONE]
BODY = b"".join(EVENTS)
CHUNKED = STREAM_HEAD + b"".join(map(chunk, EVENTS)) + LAST_CHUNK


def read(*parts: bytes, closed: bool = False) -> Response:
    """Every part arrives a second after the one before it, the first at 0."""
    found = Response()
    for second, part in enumerate(parts):
        assert not found.is_complete, "bytes after the end"
        found.feed(part, float(second))
    if closed:
        found.close(float(len(parts)))
    return found


def assert_is_the_stream(found: Response) -> None:
    assert found.is_complete
    assert found.failure is None
    assert len(found.events.times) == 2
    assert (found.events.prompt_tokens, found.events.output_tokens) == (5, 2)


def test_chunks_as_they_usually_come() -> None:
    found = read(STREAM_HEAD, *map(chunk, EVENTS), LAST_CHUNK)
    assert_is_the_stream(found)
    assert found.keeps_connection
    assert list(found.events.times) == [2.0, 3.0]


@pytest.mark.parametrize(
    "stream",
    [
        CHUNKED,
        STREAM_HEAD + chunk(BODY) + LAST_CHUNK,
        STREAM_HEAD + b"".join(chunk(BODY[at : at + 7]) for at in range(0, len(BODY), 7)) + LAST_CHUNK,
        STREAM_HEAD + b"".join(chunk(part) for part in EVENTS) + b"0\r\nX-Sum: 7\r\nX-Other: 8\r\n\r\n",
        STREAM_HEAD + b"".join(b"%X ;a=b\r\n%b\r\n" % (len(part), part) for part in EVENTS) + b"000\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED,
        STREAM_HEAD.replace(b"Transfer-Encoding: chunked", b"content-length: %d" % len(BODY)) + BODY,
    ],
    ids=["one event a chunk", "one chunk", "small chunks", "trailer", "extensions", "continue", "length"],
)
def test_split_at_every_byte(stream: bytes) -> None:
    for cut in range(1, len(stream)):
        found = read(stream[:cut], stream[cut:])
        assert_is_the_stream(found)
        assert found.keeps_connection
    assert_is_the_stream(read(*(stream[at : at + 1] for at in range(len(stream)))))


@given(st.data())
def test_any_chunks_cut_anywhere(data: st.DataObject) -> None:
    """The chunks of the server, and what is read at a time, are independent of each other and of the events."""
    bounds = data.draw(st.lists(st.integers(1, len(BODY) - 1), max_size=10, unique=True))
    stream = STREAM_HEAD + b"".join(chunk(part) for part in split(BODY, bounds)) + LAST_CHUNK
    cuts = data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=20, unique=True))
    assert_is_the_stream(read(*split(stream, cuts)))


def test_a_part_of_a_chunk_that_looks_like_a_chunk() -> None:
    """The read begins with a length, as a line of the events may, and is as long as that says."""
    body = event(chat(" b"))
    cut = len(STREAM_HEAD) + len(chunk(EVENTS[1])) + len(b"a1\r\n: ")
    stream = STREAM_HEAD + chunk(EVENTS[1]) + chunk(b": %x\r\n%b" % (len(body), body)) + chunk(DONE) + LAST_CHUNK
    end = cut + len(b"%x\r\n%b\r\n" % (len(body), body))
    found = read(stream[:cut], stream[cut:end], stream[end:])
    assert found.failure is None
    assert list(found.events.times) == [0.0, 1.0]


def test_body_that_ends_with_the_connection() -> None:
    head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    found = read(head, BODY)
    assert not found.is_complete
    found = read(head, BODY, closed=True)
    assert_is_the_stream(found)
    assert not found.keeps_connection


def test_connection_that_is_to_be_closed() -> None:
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nConnection: Close\r\n\r\n")
    found = read(head + chunk(BODY) + LAST_CHUNK)
    assert_is_the_stream(found)
    assert not found.keeps_connection
    old = read(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n")
    assert old.keeps_connection
    assert not read(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n").keeps_connection


@pytest.mark.parametrize("extra", [b"x", b"HTTP/1.1 200 OK\r\n"])
@pytest.mark.parametrize("stream", [CHUNKED, plain("200 OK", b"{}")])
def test_bytes_after_the_answer_end_the_connection(stream: bytes, extra: bytes) -> None:
    found = read(stream + extra)
    assert found.is_complete
    assert not found.keeps_connection


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ([b""], "closed before an answer"),
        ([b"HTT"], "the answer is not HTTP/1.1: HTT"),
        ([STREAM_HEAD], "closed before the end of the stream"),
        ([STREAM_HEAD, chunk(EVENTS[1])], "closed before the end of the stream"),
        ([CHUNKED[:-1]], "closed before the end of the stream"),
        ([CHUNKED[:-30]], "closed before the end of the stream"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234"], "closed before the end of the stream"),
    ],
)
def test_server_that_closes_early(parts: list[bytes], failure: str) -> None:
    found = read(*parts, closed=True)
    assert (found.is_complete, found.keeps_connection, found.failure) == (True, False, failure)


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "the answer is not HTTP/1.1: SSH-2.0-OpenSSH_9.6"),
        (b"\x00\x01\x02\x03", "the answer is not HTTP/1.1: \x00\x01\x02\x03"),
        (b"HTTP/1.1 OK\r\n\r\n", "the answer is not HTTP/1.1: HTTP/1.1 OK"),
        (b"HTTP/2 200\r\n\r\n", "the answer is not HTTP/1.1: HTTP/2 200"),
        (STREAM_HEAD + b"zz\r\nabc", "a chunk has no length: zz"),
        (STREAM_HEAD + b"-5\r\nabc", "a chunk has no length: -5"),
        (STREAM_HEAD + chunk(EVENTS[1]) + b"\r\n\r\n", "a chunk has no length: "),
        (STREAM_HEAD + chunk(b"data: oops\n\n"), "an event of the stream is not a JSON object: oops"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "the answer's Content-Length is no number: many"),
        (STREAM_HEAD + chunk(EVENTS[1]) + LAST_CHUNK, "the stream ended without a reason or [DONE]"),
        (STREAM_HEAD + LAST_CHUNK, "the stream ended without a reason or [DONE]"),
        (plain("200 OK", b'{"a": 1}'), 'the answer is no stream of events: application/json: {"a": 1}'),
        (plain("429 Too Many Requests", b'{"error": {"message": "slow down"}}'), "HTTP 429: slow down"),
        (plain("500 Internal Server Error", b"oh\nno"), "HTTP 500: oh no"),
        (plain("404 Not Found", b'["x"]'), 'HTTP 404: ["x"]'),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "HTTP 204: "),
        (plain("307 Temporary Redirect", b"", "Location: /v2"), "HTTP 307: "),
    ],
)
def test_failures(data: bytes, failure: str) -> None:
    found = read(data)
    assert (found.is_complete, found.failure) == (True, failure)
    one_by_one = Response()
    for at in range(len(data)):
        if not one_by_one.is_complete:
            one_by_one.feed(data[at : at + 1], 0.0)
    assert one_by_one.is_complete
    assert one_by_one.failure is not None
    assert one_by_one.failure.partition(":")[0] == failure.partition(":")[0]


def test_error_in_chunks() -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = read(head, chunk(b'{"error": '), chunk(b'"full"}'), LAST_CHUNK)
    assert found.failure == "HTTP 503: full"
    assert found.keeps_connection


def test_what_never_ends_is_refused() -> None:
    assert read(b"HTTP/1.1 200 OK\r\nX: " + b"x" * module.MAX_HEAD_BYTES).failure == (
        "the head of the answer is longer than 65,536 bytes"
    )
    assert read(STREAM_HEAD, b"f" * 2000).failure == "a chunk has no length: " + "f" * 159 + "…"
    assert read(CHUNKED[:-2], b"x" * 70_000).failure == "the trailer of the answer is longer than 65,536 bytes"


def test_a_large_answer_that_is_no_stream_is_not_kept() -> None:
    found = read(plain("200 OK", b"x" * 200_000))
    assert found.is_complete
    assert len(found.body) == module.MAX_BODY_BYTES


@given(st.binary(max_size=300), st.sampled_from([b"", STREAM_HEAD, STREAM_HEAD + chunk(EVENTS[1])]))
def test_garbage_is_no_crash(data: bytes, before: bytes) -> None:
    found = Response()
    found.feed(before + data, 0.0)
    found.close(1.0)
    assert found.is_complete
