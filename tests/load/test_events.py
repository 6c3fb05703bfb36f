from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.load import events as module
from slipstream.load.events import TokenEvents, error_message, shown
from tests.load.wire import DONE, ROLE, chat, event, usage

# Texts that look like what the stream itself is made of.
TREACHEROUS = [
    "[DONE]",
    "data: x",
    "\n\ndata: x\n\n",
    '"finish_reason":"stop"',
    '"finish_reason": "stop"',
    '{"error": {"message": "no"}}',
    '"completion_tokens": 9',
    "héllo ✓ 😀",
    "\r\n",
    "\\",
    '"',
]


def read(*parts: bytes) -> TokenEvents:
    """Every part arrives a second after the one before it, the first at 0."""
    found = TokenEvents()
    for second, part in enumerate(parts):
        found.feed(part, float(second))
    return found


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]


def test_times_are_those_of_events_with_text() -> None:
    parts = [event(chat(ROLE)), event(chat(" a")), event(chat(" b")), event(chat({}, "stop")), event(usage(3, 2)), DONE]
    found = read(*parts)
    assert list(found.times) == [1.0, 2.0]
    assert (found.prompt_tokens, found.output_tokens) == (3, 2)
    assert found.is_finished
    assert found.failure is None


def test_the_last_text_may_come_with_the_reason_of_the_end() -> None:
    found = read(event(chat(" a")), event(chat(" b")), event(chat(" c", "length")))
    assert list(found.times) == [0.0, 1.0, 2.0]
    assert found.is_finished


def test_events_of_one_read_share_its_time() -> None:
    found = read(event(chat(" a")), b"".join(event(chat(text)) for text in ("b", "c", "d")) + event(chat(" e")))
    assert list(found.times) == [0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"refusal": "no"},
    ],
)
def test_what_else_counts_as_text(delta: dict[str, Any]) -> None:
    assert list(read(event(chat(ROLE)), event(chat(delta)), event(chat(" a"))).times) == [1.0, 2.0]


def test_completions() -> None:
    texts = [{"choices": [{"index": 0, "text": text, "finish_reason": reason}]} for text, reason in
             [("", None), (" a", None), (" b", None), ("", "length")]]  # fmt: skip
    found = read(*(event(text) for text in texts))
    assert list(found.times) == [1.0, 2.0]
    assert found.is_finished


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
@pytest.mark.parametrize("text", TREACHEROUS)
def test_text_that_looks_like_the_stream(text: str, spaced: bool, line_break: str) -> None:
    def written(content: dict[str, Any]) -> bytes:
        return event(content, spaced=spaced, line_break=line_break)

    found = read(written(chat("a")), written(chat(text)), written(chat(text)), written(chat({}, "stop")))
    assert list(found.times) == [0.0, 1.0, 2.0]
    assert found.is_finished
    assert found.failure is None
    assert found.output_tokens == -1


def test_comments_other_fields_and_empty_lines_are_no_events() -> None:
    noise = b": ping\n\nevent: message\nid: 7\nretry: 5\n"
    found = read(noise + event(chat(" a")), noise, noise + event(chat(" b")), noise * 3 + event(chat(" c")) + noise)
    assert list(found.times) == [0.0, 2.0, 3.0]


def test_data_without_a_space() -> None:
    found = read(*(event(chat(text)).replace(b"data: ", b"data:") for text in "abc"), b"data:[DONE]\n\n")
    assert list(found.times) == [0.0, 1.0, 2.0]
    assert found.is_finished


def test_usage_in_every_event() -> None:
    parts = [event({**chat(text), "usage": usage(5, count)["usage"]}) for count, text in enumerate("abc", 1)]
    found = read(*parts, DONE)
    assert list(found.times) == [0.0, 1.0, 2.0]
    assert found.output_tokens == 3
    assert read(*(event({**chat(text), "usage": None}) for text in "abc")).output_tokens == -1


def test_a_last_line_may_lack_its_line_break() -> None:
    found = read(event(chat(" a")), b"data: [DONE]")
    assert not found.is_finished
    found.end(9.0)
    assert found.is_finished


@pytest.mark.parametrize(
    ("part", "failure"),
    [
        (event({"error": {"message": "engine\n died", "code": 500}}), "error in the stream: engine died"),
        (event({"object": "error", "error": "no room"}), "error in the stream: no room"),
        (b"data: {oops\n\n", "an event of the stream is not a JSON object: {oops"),
        (b"data: [1]\n\n", "an event of the stream is not a JSON object: [1]"),
    ],
)
def test_failures(part: bytes, failure: str) -> None:
    assert read(part).failure == failure


def test_an_error_after_text() -> None:
    assert read(event(chat(" a")), event({"error": {"message": "late"}})).failure == "error in the stream: late"
    assert read(event(chat(" a")), event({**chat(" b"), "error": None})).failure is None


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    assert read(b"data: " + b"x" * 90).failure is None
    assert read(b"data: " + b"x" * 90, b"x" * 90).failure == "an event of the stream is longer than 100 bytes"


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_split_at_every_byte(line_break: str) -> None:
    contents = [chat(ROLE), chat(" a"), chat(TREACHEROUS[2]), chat("é"), chat({}, "length"), usage(4, 3)]
    data = b"".join(event(content, line_break=line_break) for content in contents) + DONE
    for cut in range(1, len(data)):
        found = read(data[:cut], data[cut:])
        assert (len(found.times), found.prompt_tokens, found.output_tokens) == (3, 4, 3)
        assert found.is_finished
        assert found.failure is None
        # An event is there once its line is complete.
        ends = [len(event(chat(ROLE), line_break=line_break)) - len(line_break)]
        for content in contents[1:4]:
            ends.append(ends[-1] + len(event(content, line_break=line_break)))
        assert list(found.times) == [0.0 if end <= cut else 1.0 for end in ends[1:]]


@given(
    st.lists(st.text(min_size=1) | st.sampled_from(TREACHEROUS), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
    st.data(),
)
def test_any_text_cut_anywhere(texts: list[str], spaced: bool, line_break: str, data: st.DataObject) -> None:
    contents = [chat(ROLE), *map(chat, texts), chat({}, "stop"), usage(7, len(texts))]
    stream = b": hello\n\n".join(event(content, spaced=spaced, line_break=line_break) for content in contents) + DONE
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    found = read(*(part for part in split(stream, cuts) if part))
    assert len(found.times) == len(texts)
    assert list(found.times) == sorted(found.times)
    assert found.output_tokens == len(texts)
    assert found.is_finished
    assert found.failure is None


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_garbage_is_no_crash(data: bytes, cuts: list[int]) -> None:
    found = read(*(part for part in split(data, [cut for cut in cuts if cut <= len(data)]) if part))
    found.end(1.0)
    assert len(found.times) == 0 or b"data:" in data


def test_error_messages_of_several_servers() -> None:
    assert error_message({"error": {"message": "a", "type": "b"}}) == "a"
    assert error_message({"error": "a"}) == "a"
    assert error_message({"detail": "Not Found"}) == "Not Found"
    assert error_message({"object": "error", "message": "a"}) == "a"
    assert shown(b"x" * 500) == "x" * 159 + "…"
    assert shown(b"\xff\x00 a") == "\ufffd\x00 a"
