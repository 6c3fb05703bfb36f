from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.detokenizer import IncrementalDetokenizer, StopStringMatcher
from slipstream.models.tokenizer import Tokenizer


class Bytes:
    """One token a byte: every character beyond ASCII is spread over several tokens."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_pieces_join_to_the_text_and_are_whole_characters(text: str, sizes: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(Bytes())
    data, pieces, at = list(text.encode()), [], 0
    rng = random.Random(0)
    while at < len(data):
        size = rng.choice(sizes)
        pieces.append(detokenizer.add(data[at : at + size]))
        at += size
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_an_unfinished_character_waits_and_shows_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(Bytes())
    assert detokenizer.add(list(b"a\xe2")) == ""
    assert detokenizer.add([0x82]) == ""
    assert detokenizer.add([0xAC]) == "a€"
    assert detokenizer.add([0xF0]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!  Two spaces\n\nand lines.",
        "naïve café 東京都 🇫🇷👩‍👩‍👧 done",
        "def f(x):\n\treturn x ** 2  # 12345",
        "العربية हिन्दी 한국어",
    ],
)
def test_a_real_tokenizer(smollm2_tokenizer: Tokenizer, text: str) -> None:
    token_ids = smollm2_tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer)
    pieces = [detokenizer.add([token_id]) for token_id in token_ids] + [detokenizer.flush()]
    assert "".join(pieces) == smollm2_tokenizer.decode(token_ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    cut=st.integers(1, 4),
)
def test_stop_strings_equal_a_search_in_the_whole_text(text: str, stop: list[str], cut: int) -> None:
    matcher, shown = StopStringMatcher(stop), ""
    for at in range(0, len(text), cut):
        shown += matcher.add(text[at : at + cut])
        ends = [text.find(s) + len(s) for s in stop if text.find(s) >= 0 and text.find(s) + len(s) <= at + cut]
        if matcher.matched is not None:
            assert ends and text[len(shown) :].startswith(matcher.matched)
            assert matcher.matched in stop
            return
        assert not ends, "a stop string was missed"
    assert shown + matcher.flush() == text


def test_nothing_of_a_stop_string_is_shown_early() -> None:
    matcher = StopStringMatcher(["END"])
    assert [matcher.add(piece) for piece in ("go E", "N", "O! EN", "D of it")] == ["go ", "", "ENO! ", ""]
    assert matcher.matched == "END"
