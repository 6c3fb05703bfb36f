"""llguidance as the library of grammars: JSON schemas, regular expressions, choices and its variant of Lark.

Optional: without the package, requests with a structure are refused with a hint at how to install it. A schema is
enforced as a whole or refused: keywords that the library does not know are never ignored, and ``oneOf`` is not read as
``anyOf``, which would change what a schema means.
"""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.errors import RequestError
from slipstream.grammar.interface import Words
from slipstream.structured import StructuredOutput
from slipstream.text.tokenizer import Tokenizer

# Between the parts of a document: a space, or a new line and its indentation. Without a limit small models write spaces
# for ever.
_WHITESPACE = r"\x20|\r?\n[\x20\x09]{0,24}"
_JSON_OPTIONS = {"coerce_one_of": False, "lenient": False}
_LIMITED_WHITESPACE = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
_NO_WHITESPACE = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_MAX_MESSAGE = 300
_NUM_CHECKED = 256


@functools.cache
def library() -> Any:
    """The package; None if it is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        return None


def grammar_of(structure: StructuredOutput) -> str:
    """The structure in the library's own form."""
    matcher = library().LLMatcher
    if structure.json is not None:
        whitespace = _NO_WHITESPACE if structure.disable_any_whitespace else _LIMITED_WHITESPACE
        # The overrides come last: a schema cannot switch them on again by a key of its own.
        return str(matcher.grammar_from_json_schema(structure.json, overrides={**_JSON_OPTIONS, **whitespace}))
    if structure.regex is not None:
        return str(matcher.grammar_from_regex(structure.regex))
    if structure.choice is not None:
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in structure.choice)
        return str(matcher.grammar_from_lark(f"start: {choices}"))
    return str(matcher.grammar_from_lark(structure.grammar))


@functools.lru_cache(_NUM_CHECKED)
def find_refusal(structure: StructuredOutput) -> str | None:
    """Why a structure cannot be enforced, in one line that names the keyword; None if it can."""
    if library() is None:
        return "structured output needs the package llguidance: pip install 'slipstream[structured]'"
    try:
        is_error, messages = library().LLMatcher.validate_grammar_with_warnings(grammar_of(structure))
    except ValueError as error:
        is_error, messages = True, [str(error)]
    return _explain(structure, messages[0]) if is_error else None


def _explain(structure: StructuredOutput, message: str) -> str:
    what = "schema" if structure.json is not None else structure.kind
    line = " ".join(message.split())
    return f"this {what} cannot be enforced: {line[:_MAX_MESSAGE]}"


class GuidanceMatcher:
    """One request's place in its grammar."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def consume(self, token_ids: Sequence[int]) -> int:
        return int(self.inner.try_consume_tokens(list(token_ids)))

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)

    def copy(self) -> GuidanceMatcher:
        return GuidanceMatcher(self.inner.deep_copy())

    @property
    def error(self) -> str:
        return " ".join(str(self.inner.get_error()).split())[:_MAX_MESSAGE] if self.inner.is_error() else ""


class Guidance:
    """The library over one tokenizer's vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._make: Callable[[], Any] = lambda: _read_vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._executor: Any = None

    def prepare(self) -> None:
        self._prepared()

    def _prepared(self) -> Any:
        """Read the vocabulary, once: it takes tenths of a second, in which no other thread runs Python."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary, self._executor = self._make(), library().LLExecutor()
            return self._vocabulary

    def compile(self, structure: StructuredOutput) -> GuidanceMatcher:
        matcher = GuidanceMatcher(library().LLMatcher(self._prepared(), grammar_of(structure), log_level=0))
        if error := matcher.error:
            raise RequestError(_explain(structure, error))
        return matcher

    def fill(self, places: Sequence[tuple[GuidanceMatcher, int]], words: Words) -> None:
        found = [(matcher.inner, row) for matcher, row in places]
        num_rows, num_words = words.shape
        if len(found) == 1:  # waking threads takes longer than most masks
            row = words[found[0][1]]
            found[0][0].unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        elif found:
            self._executor.unsafe_compute_mask_ptr(found, words.ctypes.data, num_words * words.itemsize, num_rows)


class _Vocabulary:
    """A tokenizer as the library asks for it: the bytes of every token, and how a text becomes tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_token_id
        # A special token is never part of a text, though its name may look like one.
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        special = frozenset(self.special_token_ids)
        spell = tokenizer.token_bytes
        self.tokens = [tokenizer.token(i).encode() if i in special else spell(i) for i in range(vocab_size)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _read_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    wrapper = library().TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids[0]))
    return library().LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(eos_token_ids))
