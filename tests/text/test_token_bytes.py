"""The bytes of single tokens: joined, they are the text; alone, what the published formats say."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import bytes_to_unicode

from slipstream.text.tokenizer import Tokenizer
from tests.text.text_samples import SPECIALS, TEXTS

SPACE = "▁"


def join(tokenizer: Tokenizer, text: str) -> bytes:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return b"".join(map(tokenizer.token_bytes, ids))


def test_every_byte_of_gpt2s_table() -> None:
    letters = bytes_to_unicode()
    backend = Backend(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, named_tokens={})
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("text", [text for text in TEXTS if "\x00" not in text])  # bytes this vocabulary lacks
def test_the_default_model(smollm2_tokenizer: Tokenizer, text: str) -> None:
    assert join(smollm2_tokenizer, text) == text.encode()


def test_byte_level_with_added_tokens(trained: tuple[dict[str, int], list[tuple[str, str]]]) -> None:
    backend = Backend(models.BPE(vocab=trained[0], merges=trained[1]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS[:3])
    backend.add_tokens([*SPECIALS[3:], "two words 東"])  # letters that are not in the table
    tokenizer = Tokenizer(backend, named_tokens={})
    for text in [*TEXTS, "call <tool>x</tool>", "in two words 東."]:
        assert join(tokenizer, text) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


def sentencepiece(decoder: Any, prepend_scheme: str) -> Tokenizer:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", SPACE + "a", SPACE * 2, "é"]
    merges = [(SPACE, "a"), (SPACE, SPACE)]
    vocab = {piece: idx for idx, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme, split=False)
    backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, named_tokens={})


LLAMA = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


@pytest.mark.parametrize(
    ("decoder", "prepend_scheme", "added"),
    [
        (decoders.Sequence(LLAMA), "first", b" "),
        (decoders.Sequence(LLAMA[:3]), "never", b""),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]), "first", b" "),
    ],
    ids=["llama", "gemma", "metaspace"],
)
@pytest.mark.parametrize("text", ["a", "a a  b", "aéb €", "日本 a", "<s>a"])
def test_sentencepiece(decoder: Any, prepend_scheme: str, added: bytes, text: str) -> None:
    """A space before the text is a token's own, and stripped where the text is decoded."""
    tokenizer = sentencepiece(decoder, prepend_scheme)
    expected = text.encode() if text.startswith("<s>") else added + text.encode()
    assert join(tokenizer, text) == expected
    assert tokenizer.token_bytes(2 + 0xE2) == b"\xe2"
    assert tokenizer.token_bytes(2 + 256 + 3) == b" a", "also where the token is decoded alone"


def test_without_byte_fallback_such_tokens_are_plain_text() -> None:
    tokenizer = sentencepiece(decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()]), "never")
    assert tokenizer.token_bytes(2 + 0xE2) == b"<0xE2>"


@pytest.mark.parametrize("decoder", [None, decoders.Sequence([decoders.Replace(Regex("b+"), "c"), decoders.Fuse()])])
def test_other_rules_give_what_the_token_decodes_to(decoder: Any) -> None:
    tokenizer = sentencepiece(decoder, "never")
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes(token_id).decode() == tokenizer.decode([token_id], skip_special_tokens=False)
    assert tokenizer.token_bytes(10**6) == b""
