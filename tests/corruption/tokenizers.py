"""Tokenizers of every kind that a ``tokenizer.json`` can hold, small, with all the parts that published ones have."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_TEXTS = ["hello world, this is the text", "the other hello: 12 words", "shells and hills, 3 of them", "Hello! Où?"] * 4
_SPECIALS = ["<unk>", "<s>", "</s>"]


def tiny_tokenizers() -> dict[str, Tokenizer]:
    """By the names in ``cases``."""
    made = {name: build() for name, build in _KINDS.items()}
    for tokenizer in made.values():
        ids = [(token, tokenizer.token_to_id(token)) for token in _SPECIALS[1:]]
        template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A </s> $B:1", special_tokens=ids)
        tokenizer.post_processor = processors.Sequence([template])
    return made


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|[^\s\p{L}\p{N}]+|\s+"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=265, special_tokens=_SPECIALS[:1], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.add_special_tokens(_SPECIALS)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it."""
    letters = ["▁", *"abcdehlort", "he", "ll", "hell", "hello", "▁hello"]
    tokens = [*_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(240)), *letters]
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    vocabulary = {token: idx for idx, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(_SPECIALS)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=_SPECIALS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=100, special_tokens=_SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def _word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    tokenizer.train_from_iterator(_TEXTS, trainers.WordLevelTrainer(special_tokens=_SPECIALS, show_progress=False))
    tokenizer.enable_truncation(100)
    tokenizer.enable_padding(length=8)
    return tokenizer


_KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "byte-fallback": _byte_fallback,
    "unigram": _unigram,
    "word-piece": _word_piece,
    "word-level": _word_level,
}
