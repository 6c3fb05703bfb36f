"""The library of grammars over our tokenizers: what is legal follows from the bytes of the tokens alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from slipstream import RequestError, StructuredOutput
from slipstream.grammar import guidance
from slipstream.grammar.guidance import Guidance, GuidanceMatcher, find_refusal
from slipstream.text.tokenizer import Tokenizer

CHOICES = ["yes", "yesterday", "no", 'a "quoted" é', "tab\there"]
NAMES = {"eos_token": "</s>"}


def byte_level() -> Tokenizer:
    """Bytes as letters, some of them joined, and a special token whose name is part of a choice."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("t", "a"), ("ta", "b"), ("Ġ", '"'), ('"', "q")]
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "yes"])
    backend.add_tokens(["<tool>"])
    return Tokenizer(backend, named_tokens=NAMES)


def sentencepiece() -> Tokenizer:
    """Spaces as ▁, and bytes by number where there is no token."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "y", "e", "s", "ye", "yes", "▁", "▁q", "é"]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    rules = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(rules)
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, named_tokens=NAMES)


TOKENIZERS = {"byte level": byte_level, "sentencepiece": sentencepiece}


class Setting:
    """A vocabulary padded as an embedding is, with two tokens that end a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size + 37
        assert tokenizer.eos_token_id is not None
        self.ends = {tokenizer.eos_token_id, tokenizer.vocab_size}
        self.guidance = Guidance(
            tokenizer, self.vocab_size, sorted(self.ends, key=lambda i: i != tokenizer.eos_token_id)
        )

    def legal(self, matcher: GuidanceMatcher) -> set[int]:
        words = np.full((3, -(-self.vocab_size // 32)), 0x55, dtype=np.int32)
        self.guidance.fill([(matcher, 1)], words)
        assert (words[[0, 2]] == 0x55).all()
        found = np.flatnonzero(np.unpackbits(words[1].view(np.uint8), bitorder="little"))
        return set(found.tolist())

    def expected(self, before: bytes, texts: list[bytes]) -> set[int]:
        """Tokens whose bytes lead towards one of the texts."""
        found = set(self.ends if before in texts else ())
        for token_id in set(range(self.tokenizer.vocab_size)) - self.tokenizer.special_token_ids:
            added = self.tokenizer.token_bytes(token_id)
            if added and any(text.startswith(before + added) for text in texts):
                found.add(token_id)
        return found


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_legal_tokens_are_those_whose_bytes_lead_on(kind: str) -> None:
    setting, rng = Setting(TOKENIZERS[kind]()), random.Random(3)
    texts = [choice.encode() for choice in CHOICES]
    first = setting.guidance.compile(StructuredOutput(choice=CHOICES))
    for _ in range(12):
        matcher, before = first.copy(), b""
        while True:
            expected = setting.expected(before, texts)
            found = setting.legal(matcher)
            # Where the text is certain, the library allows its usual spelling alone.
            is_certain = len({text[len(before) :][:1] for text in texts if text.startswith(before)}) == 1
            assert found == expected or (is_certain and len(found) == 1 and found < expected), before
            token_id = rng.choice(sorted(found))
            if token_id in setting.ends:
                break
            assert matcher.consume([token_id]) == 1
            before += setting.tokenizer.token_bytes(token_id)
        assert before in texts


def test_a_matcher_goes_back_to_where_it_was() -> None:
    setting = Setting(byte_level())
    matcher = setting.guidance.compile(StructuredOutput(regex="[a-c]{2}d?"))
    a, d = (setting.tokenizer.encode(text)[0] for text in "ad")
    begin = setting.legal(matcher)
    assert matcher.consume([a, d]) == 1 and not matcher.error, "d comes too early"
    assert matcher.consume([a, d]) == 2 and setting.legal(matcher) == setting.ends
    matcher.rollback(3)
    assert setting.legal(matcher) == begin


def test_many_masks_at_once_are_those_of_each() -> None:
    setting = Setting(byte_level())
    structures = [StructuredOutput(regex=f"[a-{c}]+") for c in "bcdefgh"]
    matchers = [setting.guidance.compile(structure) for structure in structures]
    words = np.zeros((9, -(-setting.vocab_size // 32)), dtype=np.int32)
    setting.guidance.fill([(matcher, 8 - i) for i, matcher in enumerate(matchers)], words)
    for i, matcher in enumerate(matchers):
        found = np.flatnonzero(np.unpackbits(words[8 - i].view(np.uint8), bitorder="little"))
        assert set(found.tolist()) == setting.legal(matcher)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}], "x-guidance": {"coerce_one_of": True}}}, "oneOf"),
        ({"json": {"not": {"const": 1}, "x-guidance": {"lenient": True}}}, "not"),
        ({"json": {"type": "string", "format": "colour"}}, "colour"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: missing"}, "missing"),
    ],
)
def test_a_refusal_names_the_keyword(given: dict[str, Any], named: str) -> None:
    structure = StructuredOutput(**given)
    refusal = find_refusal(structure)
    assert refusal is not None and named in refusal and "\n" not in refusal
    with pytest.raises(RequestError, match="cannot be enforced"):
        Setting(byte_level()).guidance.compile(structure)


def test_without_the_library_a_request_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "library", lambda: None)
    assert "pip install" in (find_refusal.__wrapped__(StructuredOutput(regex="a")) or "")


def test_every_schema_of_the_sample_is_served_or_refused() -> None:
    lines = Path(__file__).with_name("json_schema_bench.jsonl").read_text(encoding="utf-8").splitlines()
    refusals = [find_refusal(StructuredOutput(json=json.loads(line)["schema"])) for line in lines]
    assert len(lines) == 200
    reasons = [refusal for refusal in refusals if refusal is not None]
    assert 0 < len(reasons) < 50
    assert all(reason.startswith("this schema cannot be enforced: ") and "\n" not in reason for reason in reasons)
