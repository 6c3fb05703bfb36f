"""Tokenizers rebuilt from the vocabulary, merges and scores inside a GGUF file.

Knows the two kinds that the supported models use: byte-level BPE (``gpt2``), where ``tokenizer.ggml.pre`` names the
rule that splits a text before merging, and SentencePiece BPE (``llama``), where merges follow from the scores. A wrong
split rule would only make the model slightly worse, without an error; so an unknown one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.text.tokenizer_file import find_bad_merge, reraise_foreign
from slipstream.values import describe_value

_NO_TOKEN = 0xFFFFFFFF  # -1 as llama.cpp's converters write it


_PREFIX = "tokenizer.ggml."
_SPACE = "▁"
_MAX_TOKEN_LENGTH = 1 << 14  # merges from scores need all ways to split a token in two


class TokenType(IntEnum):
    """The type of a token, with llama.cpp's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SplitRule:
    """How a byte-level tokenizer splits a text into words."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False  # a word in the vocabulary is one token, whatever the merges
    adds_bos: bool = False  # where the file does not say


def _by_regex(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    """Every digit separately, then as GPT-2 splits."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# Contractions, words with one leading mark, numbers (the part that differs), punctuation, white space.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = SplitRule(_by_regex(_WORDS % r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_QWEN2 = SplitRule(_by_regex(_WORDS % r"\p{N}"), normalizer=normalizers.NFC)
_GPT2 = SplitRule(_gpt2)

SPLIT_RULES: dict[str, SplitRule] = {
    "smollm": SplitRule(_single_digits),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _GPT2,
    "default": _GPT2,
}


def build_backend(metadata: Fields) -> Tokenizer:
    """The tokenizer without the special tokens around a text, which the caller adds."""
    tokens = metadata.texts(_PREFIX + "tokens")
    if not tokens:
        raise ModelError(f"{metadata.source} holds no vocabulary; use a GGUF file that includes its tokenizer")
    if (longest := max(map(len, tokens))) > _MAX_TOKEN_LENGTH:
        raise ModelError(f"{metadata.source} has a token of {longest} characters; download it again")
    kind = metadata.text(_PREFIX + "model", "none named")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise ModelError(
            f"{metadata.source} has a tokenizer of kind {describe_value(kind)}; supported in GGUF files: gpt2, llama"
        )
    _mark_added_tokens(backend, tokens, metadata.integers(_PREFIX + "token_type"))
    return backend


def adds_bos(metadata: Fields) -> bool:
    """Whether a text starts with the beginning-of-sequence token, as llama.cpp decides it."""
    if metadata.has(key := _PREFIX + "add_bos_token"):
        return metadata.flag(key)
    if metadata.get(_PREFIX + "model") == "llama":
        return True
    rule = SPLIT_RULES.get(metadata.text(_PREFIX + "pre", "default"))
    return rule is not None and rule.adds_bos


def _byte_level(metadata: Fields, tokens: list[str]) -> Tokenizer:
    name = metadata.text(_PREFIX + "pre", "default")
    rule = SPLIT_RULES.get(name)
    if rule is None:
        known = ", ".join(SPLIT_RULES)
        raise ModelError(
            f"{metadata.source} splits words by the rule {describe_value(name)}; supported in GGUF files: {known}"
        )
    if not metadata.has(_PREFIX + "merges"):
        raise ModelError(f"{metadata.source} holds no merges for its tokenizer; convert the model again")
    vocabulary = {token: idx for idx, token in enumerate(tokens)}
    merges = _parse_merges(metadata.texts(_PREFIX + "merges"))
    backend = _assemble(models.BPE, metadata.source, vocabulary, merges, ignore_merges=rule.ignore_merges)
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Fields, tokens: list[str]) -> Tokenizer:
    vocabulary = {token: idx for idx, token in enumerate(tokens)}
    if metadata.has(_PREFIX + "merges"):
        merges = _parse_merges(metadata.texts(_PREFIX + "merges"))
    else:
        scores = metadata.numbers(_PREFIX + "scores")
        if len(scores) != len(tokens):
            raise ModelError(f"{metadata.source} holds no scores for its tokenizer; convert the model again")
        merges = _merges_from_scores(vocabulary, scores)
    unknown_id = metadata.integer(_PREFIX + "unknown_token_id", 0, low=0)
    options = {
        "unk_token": tokens[unknown_id] if unknown_id < len(tokens) else None,
        "fuse_unk": True,
        "byte_fallback": True,
    }
    backend = _assemble(models.BPE, metadata.source, vocabulary, merges, **options)
    leading_space = metadata.flag(_PREFIX + "add_space_prefix", True)
    # Only the start of the text gets a space, not each piece after a special token: no file says which of the two a
    # model was trained with, and current chat models do this.
    scheme = "first" if leading_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if leading_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _assemble(
    model: Any, source: str, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    if (bad := find_bad_merge(merges, vocabulary)) is not None:
        raise ModelError(f"{source} merges {describe_value(bad)} to what is no token; download it again")
    try:
        return Tokenizer(model(vocab=vocabulary, merges=merges, **options))
    except BaseException as error:  # the package raises bare Exceptions
        reraise_foreign(error)
        raise ModelError(f"{source} has an inconsistent tokenizer ({error}); download it again") from error


def _parse_merges(lines: list[str]) -> list[tuple[str, str]]:
    merges = []
    for line in lines:
        middle = line.find(" ", 1)  # a part may itself begin with a space
        merges.append((line[:middle], line[middle + 1 :]))
    return merges


def _merges_from_scores(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to compose a token of two others, best score first.

    SentencePiece always joins the neighbours whose union scores highest, which is what BPE does with merges in this
    order. Equal scores go by the longer left part, as in the tokenizers that Hugging Face converts.
    """
    joins = []
    for token, idx in vocabulary.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in vocabulary and right in vocabulary:
                joins.append((-scores[idx], -len(left), -len(right), left, right))
    joins.sort(key=lambda join: join[:3])
    return [(left, right) for _, _, _, left, right in joins]


def _mark_added_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are matched in a text as a whole, before any splitting; they keep the ids they have."""
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=False):
        if not token:
            continue
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def read_token_id(fields: Fields, role: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if fields.get(key) in (None, _NO_TOKEN):
        return None
    return fields.integer(key, low=0)
