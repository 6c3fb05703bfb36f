"""Forms: what other libraries write is read, however it is cut, and what is broken or too large is one line."""

from __future__ import annotations

import email.policy
import itertools
from email.mime.application import MIMEApplication
from email.mime.multipart import MIMEMultipart

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.server.errors import ApiError
from slipstream.server.http.multipart import FormLimits, FormPart, MultipartParser, parse_form, read_boundary

LIMITS = FormLimits(max_file_bytes=10_000, max_field_bytes=100, max_header_bytes=500, max_parts=5)


def parse(body: bytes, boundary: bytes = b"b", piece: int | None = None) -> list[FormPart]:
    parser = MultipartParser(boundary, LIMITS)
    for start in range(0, len(body), piece or max(1, len(body))):
        parser.feed(body[start : start + (piece or len(body))])
    return parser.finish()


def plain(parts: list[FormPart]) -> list[tuple[str, str | None, bytes]]:
    return [(part.name, part.file_name, bytes(part.content)) for part in parts]


@pytest.mark.parametrize("content", [b"", b"x", b"\r\n", b"\r\n--", b"--b", b"\r\n--bo\r\n" * 5, bytes(range(256)) * 9])
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, None])
def test_a_form_of_httpx_in_any_pieces(content: bytes, piece: int | None) -> None:
    request = httpx.Request(
        "POST", "http://x", files={"file": ("ä b.wav", content, "audio/wav")}, data={"model": "m", "n[]": ["1", "ü"]}
    )
    content_type = request.headers["content-type"].encode()
    found = parse(request.read(), read_boundary(content_type), piece)
    assert sorted(plain(found), key=str) == sorted(
        [
            ("file", "ä b.wav", content),
            ("model", None, b"m"),
            ("n[]", None, b"1"),
            ("n[]", None, "ü".encode()),
        ],
        key=str,
    )
    assert plain(parse_form(content_type, request.read(), LIMITS)) == plain(found)


@given(
    contents=st.lists(st.binary(max_size=60) | st.sampled_from([b"\r\n--b", b"\r", b"\r\n-", b"--b--"]), max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_any_content_cut_anywhere(contents: list[bytes], cuts: list[int]) -> None:
    boundary = b"a-boundary-that-no-content-has"
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="p%d"\r\n\r\n%b\r\n' % (boundary, i, content)
        for i, content in enumerate(contents)
    ]
    body = b"".join(parts) + b"--%b--\r\n" % boundary
    parser = MultipartParser(boundary, LIMITS)
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for begin, end in itertools.pairwise(places):
        parser.feed(body[begin:end])
    assert [bytes(part.content) for part in parser.finish()] == contents


def test_a_form_of_the_standard_library() -> None:
    form = MIMEMultipart("form-data", boundary="a b'()+_,-./:=?")
    part = MIMEApplication(b"\x00\x01", _encoder=lambda _: None)
    part.add_header("Content-Disposition", "form-data", name="file", filename='a"b\\c.wav')
    form.attach(part)
    head, _, body = form.as_bytes(policy=email.policy.HTTP).partition(b"\r\n\r\n")
    content_type = b" ".join(line.split(b": ", 1)[-1].strip() for line in head.splitlines() if b"MIME" not in line)
    assert plain(parse_form(content_type, body, LIMITS)) == [("file", 'a"b\\c.wav', b"\x00\x01")]


def test_preamble_and_epilogue_mean_nothing() -> None:
    body = b"preamble\r\n--b \t\r\ncontent-disposition:form-data;name=x\r\n\r\n1\r\n--b--\r\nepilogue\r\n--b"
    assert plain(parse(body)) == [("x", None, b"1")]
    assert plain(parse(body, piece=1)) == [("x", None, b"1")]
    assert parse(b"--b--") == []


NAMED = b'Content-Disposition: form-data; name="x"\r\n\r\n'
BROKEN: list[tuple[bytes, str]] = [
    (b"", "ends before the first boundary"),
    (b"--c\r\n", "ends before the first boundary"),
    (b"--b", "ends after a boundary"),
    (b"--b\r\n" + NAMED[:-2], "ends in the headers of a part"),
    (b"--b\r\n" + NAMED + b"1\r\n--", "ends in a part"),
    (b"--bx\r\n" + NAMED, "text after a boundary"),
    (b"--b" + b" " * 99, "text after a boundary"),
    (b"--b\r\n\r\n1\r\n--b--", "has no name"),
    (b"--b\r\nContent-Disposition: attachment; name=x\r\n\r\n1\r\n--b--", "has no name"),
    (b'--b\r\nContent-Disposition: form-data; name=""\r\n\r\n1\r\n--b--', "has no name"),
    (b"--b\r\nX: " + b"y" * 600, "headers of a form's part are larger than 500 bytes"),
    ((b"--b\r\n" + NAMED + b"\r\n") * 6 + b"--b--", "more than 5 parts"),
    (b"--b\r\n" + NAMED + b"y" * 200, "the form's part 'x' is larger than 100 bytes"),
    (b"--b\r\n" + NAMED.replace(b"\r\n", b"; filename=a\r\n", 1) + b"y" * 11_000, "larger than 10000 bytes"),
]


@pytest.mark.parametrize(("body", "reason"), BROKEN)
@pytest.mark.parametrize("piece", [1, None])
def test_what_is_broken_or_too_large(body: bytes, reason: str, piece: int | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, piece=piece)
    assert reason in caught.value.message
    assert caught.value.status == (413 if "the form's part" in caught.value.message else 400)


def test_little_is_kept_of_what_is_not_parsed() -> None:
    """A part is taken as it comes: what waits is no longer than a boundary."""
    parser = MultipartParser(b"b", FormLimits(max_file_bytes=1 << 24))
    parser.feed(b"--b\r\n" + NAMED.replace(b"\r\n", b"; filename=a\r\n", 1))
    for _ in range(100):
        parser.feed(b"y" * 10_000)
        assert len(parser._waiting) < 10
    assert len(parser.parts[0].content) > 999_000


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 415),
        (b"application/json", 415),
        (b"multipart/mixed; boundary=b", 415),
        (b"multipart/form-data", 400),
        (b"multipart/form-data; boundary=", 400),
        (b"multipart/form-data; boundary=" + b"b" * 300, 400),
    ],
)
def test_content_types(content_type: bytes | None, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        read_boundary(content_type)
    assert caught.value.status == status
    assert read_boundary(b'Multipart/Form-Data; charset=x; Boundary="a b"') == b"a b"


def test_fields_are_text() -> None:
    with pytest.raises(ApiError, match="'x' is not UTF-8"):
        _ = FormPart("x", None, bytearray(b"\xff")).text
