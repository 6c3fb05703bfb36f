"""Log probabilities: no token overwrites another, offsets are those of the text, and chunks join to the whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from slipstream.output import Logprob
from slipstream.server.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from slipstream.text.tokenizer import Tokenizer

from .scripted import ScriptedServer, chunks_of

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = "a€ b🙂"


class Pieces:
    """A vocabulary of any bytes, cut anywhere."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


def cut(text: str, sizes: list[int]) -> list[bytes]:
    data, pieces = text.encode(), []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@given(text=st.text(max_size=20), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7))
def test_an_offset_counts_the_characters_that_are_complete_before_the_token(text: str, sizes: list[int]) -> None:
    pieces = cut(text, sizes)
    offsets = TextOffsets(cast(Tokenizer, Pieces(pieces)))
    at = 0
    for token_id, piece in enumerate(pieces):
        assert offsets.add(token_id) == len(text.encode()[:at].decode("utf-8", "ignore"))
        at += len(piece)


def test_bytes_that_never_become_a_character_are_counted_as_they_are_shown() -> None:
    pieces = [b"a\xff", b"\xe2\x82", b"b", b"c"]  # shown as two replacement characters between a and b
    offsets = TextOffsets(cast(Tokenizer, Pieces(pieces)))
    assert [offsets.add(token_id) for token_id in range(4)] == [0, 2, 3, 4]


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A space before the text is stripped, and a character without a token is spelled in bytes."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁b", "c", "\n"]
    backend = Backend(models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, named_tokens={})


SPACE, A, B, C, NEWLINE, BOS = range(256, 262)
EURO = [0xE2, 0x82, 0xAC]


@pytest.mark.parametrize(
    ("token_ids", "text", "expected"),
    [
        ([A, B, C], "a bc", [0, 1, 3]),
        ([SPACE, *EURO, C], "€c", [0, 0, 0, 0, 1]),
        ([BOS, A, BOS, B], "a b", [0, 0, 1, 1]),
        ([C, *EURO, B], "c€ b", [0, 1, 1, 1, 2]),
    ],
)
def test_offsets_where_a_tokenizer_strips_and_skips(
    sentencepiece: Tokenizer, token_ids: list[int], text: str, expected: list[int]
) -> None:
    assert sentencepiece.decode(token_ids) == text
    offsets = TextOffsets(sentencepiece)
    assert [offsets.add(token_id) for token_id in token_ids] == expected


def test_special_tokens_that_are_shown_have_room(sentencepiece: Tokenizer) -> None:
    offsets = TextOffsets(sentencepiece, skip_special_tokens=False)
    assert [offsets.add(token_id) for token_id in (C, BOS, C)] == [0, 1, 4]


def test_every_token_has_a_key_of_its_own(sentencepiece: Tokenizer) -> None:
    """Those of parts of characters are bytes; of two tokens that are the same text the second is an id."""
    ids = [0xE2, 0x82, 0x0A, NEWLINE, SPACE, A]
    entry = {token_id: Logprob(-float(rank), rank, "\ufffd") for rank, token_id in enumerate(ids, 1)}
    found = completion_logprobs([entry], sentencepiece, TextOffsets(sentencepiece))
    names = ["bytes:\\xe2", "bytes:\\x82", "\n", f"token_id:{NEWLINE}", " ", " a"]
    assert found.top_logprobs == [{name: -float(rank) for rank, name in enumerate(names, 1)}]
    assert found.tokens == names[:1]
    assert found.token_logprobs == [-1.0]


def test_infinite_log_probabilities_are_floored(sentencepiece: Tokenizer) -> None:
    """JSON has no infinity: an answer with one could not be sent."""
    entry = {C: Logprob(-math.inf, 3, "c"), A: Logprob(-0.5, 1, "a"), B: Logprob(-math.inf, 2, "b")}
    plain = completion_logprobs([entry], sentencepiece, TextOffsets(sentencepiece))
    assert plain.token_logprobs == [-9999.0]
    assert plain.top_logprobs == [{"c": -9999.0, " a": -0.5, " b": -9999.0}]
    (content,) = chat_logprobs([entry], sentencepiece, num_top=2).content
    assert content.logprob == -9999.0
    assert [(one.token, one.logprob) for one in content.top_logprobs] == [(" a", -0.5), (" b", -9999.0)]
    for answer in (plain, content):
        json.dumps(answer.model_dump(), allow_nan=False)


@pytest.fixture
def split(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """Steps that end inside of characters, with parts of characters among the likeliest tokens."""
    ids = tokenizer.encode(TEXT)
    server = ScriptedServer(tokenizer, [(ids[:2], 0, 0), (ids[2:3], 0, 0), (ids[3:7], 0, 0), (ids[7:], 0, 0)])
    server.engine.likeliest = [tokenizer.encode("é")[0], tokenizer.encode("é")[1]]
    yield server
    server.close()


def test_completions_with_parts_of_characters(split: ScriptedServer) -> None:
    choice = split.post("/v1/completions", prompt="x", logprobs=3).json()["choices"][0]
    assert choice["text"] == TEXT
    logprobs = choice["logprobs"]
    euro, smile = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"], [f"bytes:\\x{byte:02x}" for byte in "🙂".encode()]
    assert logprobs["tokens"] == ["a", *euro, " ", "b", *smile]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3, 4, 4, 4, 4]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top == {token: -2.0, "bytes:\\xc3": -1.0, "bytes:\\xa9": -3.0}


def test_chunks_of_completions_join_to_the_whole_answer(split: ScriptedServer) -> None:
    asked: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "logprobs": 3}
    whole = {choice["index"]: choice for choice in split.post("/v1/completions", **asked).json()["choices"]}
    told: dict[int, dict[str, Any]] = {i: {} for i in range(4)}
    chunks = chunks_of(split.post("/v1/completions", **asked, stream=True))
    assert len(chunks) == 4 * 4, "each step of each choice is one"
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, values in choice["logprobs"].items():
                told[choice["index"]].setdefault(name, []).extend(values)
    assert told == {index: choice["logprobs"] for index, choice in whole.items()}


def test_chat_has_the_bytes_of_every_token(split: ScriptedServer) -> None:
    asked = {**CHAT, "logprobs": True, "top_logprobs": 2}
    content = split.post("/v1/chat/completions", **asked).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == TEXT
    assert [(one["token"], one["bytes"]) for one in content[1]["top_logprobs"]] == [
        ("bytes:\\xc3", [0xC3]),
        ("bytes:\\xe2", [0xE2]),
    ]
    chunks = chunks_of(split.post("/v1/chat/completions", **asked, stream=True))
    told = [e for chunk in chunks for c in chunk["choices"] if "logprobs" in c for e in c["logprobs"]["content"]]
    assert told == content
