from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.text.detokenizer import ByteDetokenizer, IncrementalDetokenizer, StopStringMatcher, open_detokenizer
from slipstream.text.token_bytes import TokenTable
from slipstream.text.tokenizer import Tokenizer


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


class Counting(Bytes):
    """Counts the tokens that are decoded."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return super().decode([i for i in ids if i < 256], skip_special_tokens)


@pytest.mark.parametrize(
    "token_ids",
    [[0xE2], [0xF0, 0x9F], [0x80], [999], [999, 0xE2], list("\N{EURO SIGN}".encode()), [0xE2, 0x82, 0xAC, 0xE2]],
    ids=["a lead byte", "half a character", "a rest", "no text", "both", "whole characters", "whole and half"],
)
def test_the_cost_of_a_text_is_linear_in_its_length(token_ids: list[int]) -> None:
    """Whatever bytes a request is forced to draw, and they join to what the whole list gives."""
    counting = Counting()
    detokenizer = IncrementalDetokenizer(counting)
    tokens = (token_ids * 4000)[:4000]
    text = "".join(detokenizer.add([token_id]) for token_id in tokens) + detokenizer.flush()
    assert text == Counting().decode(tokens)
    assert counting.num_decoded < 40 * len(tokens)


@given(st.lists(st.sampled_from([0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 999]), max_size=60))
def test_any_bytes_join_to_what_the_whole_list_gives(token_ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(Counting())
    text = "".join(detokenizer.add([token_id]) for token_id in token_ids) + detokenizer.flush()
    assert text == Counting().decode(token_ids)


@pytest.mark.parametrize("stop", [["late", "early"], ["early", "late"]])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_earliest_stop_string_ends_the_text_whatever_the_order(stop: list[str], size: int) -> None:
    """Both come with one piece where pieces are long, as the tokens of a step with many accepted drafts do."""
    text, matcher, shown = "well, early or late", StopStringMatcher(stop), ""
    for at in range(0, len(text), size):
        shown += matcher.add(text[at : at + size])
        if matcher.matched is not None:
            break
    assert (shown, matcher.matched) == ("well, ", "early")


class Words:
    """As SentencePiece decodes: each token has its space before it, and a text's first space is left out."""

    tokens = ("▁a", "▁b", "c", "▁", "<skip>", "▁d")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = "".join(self.tokens[i] for i in ids if not (skip_special_tokens and self.tokens[i] == "<skip>"))
        return text.replace("▁", " ").removeprefix(" ")


@given(ids=st.lists(st.integers(0, len(Words.tokens) - 1), max_size=12), size=st.integers(1, 3))
def test_spaces_between_tokens_are_not_taken_for_the_texts_first(ids: list[int], size: int) -> None:
    detokenizer = IncrementalDetokenizer(Words())
    pieces = [detokenizer.add(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join([*pieces, detokenizer.flush()]) == Words().decode(ids)


def test_a_space_before_a_word_is_streamed() -> None:
    detokenizer = IncrementalDetokenizer(Words())
    assert [detokenizer.add([i]) for i in (0, 1, 2, 5)] == ["a", " b", "c", " d"]


class ByteVocabulary:
    """A byte-level vocabulary in which tokens may be any bytes, and one is special."""

    SPECIAL = 0

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [token_id for token_id in ids if not (skip_special_tokens and token_id == self.SPECIAL)]
        return b"".join(self._pieces[token_id] for token_id in kept).decode("utf-8", "replace")

    def token_table(self, skip_special_tokens: bool = True) -> TokenTable:
        def find(token_id: int) -> bytes:
            return b"" if skip_special_tokens and token_id == self.SPECIAL else self._pieces[token_id]

        return TokenTable(find)


SNIPPETS = st.sampled_from(
    [
        b"a",
        b" b",
        "\u00e9".encode(),
        "\u20ac".encode()[:1],
        "\u20ac".encode()[1:],
        "\U0001f600".encode()[:3],
        b"\x80",
        b"\xff\xfe",
        b"",
    ]
)


@given(pieces=st.lists(SNIPPETS | st.binary(max_size=4), min_size=2, max_size=12), data=st.data(), skip=st.booleans())
def test_a_table_of_tokens_gives_the_text_of_all_of_them(pieces: list[bytes], data: st.DataObject, skip: bool) -> None:
    decoder = ByteVocabulary(pieces)
    ids = data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=30))
    detokenizer = open_detokenizer(decoder, skip)
    assert isinstance(detokenizer, ByteDetokenizer)
    text, done = "", 0
    while done < len(ids):
        count = data.draw(st.integers(1, 3))
        text += detokenizer.add(ids[done : done + count])
        done += count
        assert decoder.decode(ids[:done], skip).startswith(text), "what is shown does not change"
    assert text + detokenizer.flush() == decoder.decode(ids, skip)
