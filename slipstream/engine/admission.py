"""The boundary of the engine: every request is checked and resolved here, once.

What is admitted is plain data within the engine's limits, so that no request can crash the engine.
"""

from __future__ import annotations

import itertools
import operator
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.encoder_input import EncoderInput, EncoderPrompt
from slipstream.engine.build import EngineInfo
from slipstream.engine.pooled_prompt import (
    PooledTokens,
    TextOptions,
    TextPair,
    cut_ids,
    encode_pair,
    encode_text,
)
from slipstream.errors import RequestError
from slipstream.grammar.guidance import find_refusal
from slipstream.pooling import PoolingParams
from slipstream.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, Request
from slipstream.sampling.registry import check_request
from slipstream.sampling_params import MAX_SEED, SamplingParams
from slipstream.scheduler.pages import check_fits
from slipstream.structured import StructuredOutput
from slipstream.text.tokenizer import Tokenizer
from slipstream.values import MAX_INT32, Bounds, check_vocabulary, describe_value, is_valid_text, read_number

Prompt = str | Sequence[int] | EncoderPrompt

_PRIORITY = Bounds(-MAX_INT32 - 1, MAX_INT32, is_integer=True, may_be_none=False)
_MAX_ID_LENGTH = 256
_FIRST_PREFIX = "0.0:"  # the default, so that an engine draws the same seeds in a thread and in a process
# Of a request that draws nothing.
_NO_SAMPLING = SamplingParams(temperature=0.0, seed=0).with_defaults(SamplingParams())


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt that was checked and resolved: one request for each choice."""

    request_id: str  # the caller's; the requests have engine-internal ids
    prompt: str | None
    requests: tuple[Request, ...]


class Admission:
    """``info`` is read for every request: an engine that was restarted may have other limits.

    Each client of an engine has its own ``id_prefix``, and so its own seeds.
    """

    def __init__(self, info: Callable[[], EngineInfo], id_prefix: str = "") -> None:
        self._info = info
        self._id_prefix = id_prefix
        self._serials = itertools.count()
        self._name = secrets.token_hex(4)  # random, so that a generated id is never one that a caller chose
        seed = info().config.seed
        is_first = id_prefix in ("", _FIRST_PREFIX)
        self._seeds = random.Random(seed if is_first or seed is None else f"{seed} {id_prefix}")
        self._lock = threading.Lock()

    def resolve(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, priority: int = 0
    ) -> Submission:
        """Check a prompt and resolve everything the engine needs; raises RequestError before anything runs."""
        info = self._info()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be SamplingParams, not {describe_value(params)}")
        if info.pooling.is_all:
            raise RequestError("this checkpoint has no weights for logits, so it cannot generate; call embed")
        request_id = _read_id(request_id)
        encoder, num_entries = _read_encoder_input(prompt, info)
        token_ids = self._token_ids(prompt, info)
        _check_length(len(token_ids), info)
        vocab_size = info.config.model.vocab_size
        check_vocabulary("prompt", token_ids, vocab_size)
        check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
        params = params.with_defaults(info.defaults)
        with self._lock:
            serial = f"{self._id_prefix}{next(self._serials)}"
            if params.seed is None:
                params = params.with_seed(self._seeds.randint(0, MAX_SEED))
        if params.structured is not None:
            _check_structure(params.structured, info)
        # Where there is a grammar its end is an end: then ``ignore_eos`` puts it off as long as anything else is legal.
        end_ids = () if params.ignore_eos and params.structured is None else info.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*end_ids, *params.stop_token_ids)))
        first = Request(
            request_id=serial,
            prompt_token_ids=token_ids,
            params=params,
            stop_token_ids=stop_token_ids,
            max_total_tokens=_max_total_tokens(len(token_ids), num_entries, params.max_tokens, info),
            arrival_time=time.monotonic(),
            priority=read_number("priority", priority, _PRIORITY),
            bad_word_ids=_bad_word_ids(params.bad_words, info),
            encoder=encoder,
            num_encoder_entries=num_entries,
        )
        check_request(first, vocab_size)
        check_fits(first, info.config.cache)
        others = (replace(first, request_id=f"{serial}.{i}", choice=i) for i in range(1, params.n))
        text = prompt if isinstance(prompt, str) else None
        return Submission(request_id or f"request-{self._name}-{serial}", text, (first, *others))

    def resolve_pooled(
        self,
        prompt: Prompt,
        pooling: PoolingParams,
        request_id: str | None = None,
        priority: int = 0,
        options: TextOptions | None = None,
    ) -> Submission:
        """The same for a text that is to become a vector."""
        info, options = self._info(), options or TextOptions()
        pooling = info.pooling.fill(pooling, info.config.model.hidden_size)
        before = info.pooling.prompt_of(options.prompt_name)
        text = before + prompt if isinstance(prompt, str) else prompt
        return self._pool(text, self._pooled_tokens(text, info, options), pooling, request_id, priority)

    def resolve_scored(
        self,
        item: Prompt | TextPair,
        request_id: str | None = None,
        priority: int = 0,
        options: TextOptions | None = None,
    ) -> Submission:
        """The same for a text that is to be classified, or a pair that is to be scored."""
        info, options = self._info(), options or TextOptions()
        pooling = info.pooling.fill_scores()
        if not isinstance(item, TextPair):
            return self._pool(item, self._pooled_tokens(item, info, options), pooling, request_id, priority)
        assert info.pooling.scoring is not None
        limit = options.limit(info.config.scheduler.max_model_len)
        tokens = encode_pair(_tokenizer_of(info), item, info.pooling.scoring, limit, options.instruction)
        return self._pool(item, tokens, pooling, request_id, priority)

    def _pooled_tokens(self, prompt: Prompt, info: EngineInfo, options: TextOptions) -> PooledTokens:
        limit = options.limit(info.config.scheduler.max_model_len)
        if isinstance(prompt, str):
            return encode_text(_tokenizer_of(info), prompt, limit)
        if limit is not None and not isinstance(prompt, EncoderPrompt) and hasattr(prompt, "__len__"):
            prompt = cut_ids(prompt, limit)
        return PooledTokens(self._token_ids(prompt, info, num_drawn=0))

    def _pool(
        self,
        prompt: Prompt | TextPair,
        tokens: PooledTokens,
        pooling: PoolingParams,
        request_id: str | None,
        priority: int,
    ) -> Submission:
        """A request that ends with its prompt."""
        info, (token_ids, second_from) = self._info(), tokens
        request_id = _read_id(request_id)
        encoder, num_entries = _read_encoder_input(prompt, info)
        _check_length(len(token_ids), info, num_drawn=0)
        check_vocabulary("prompt", token_ids, info.config.model.vocab_size)
        with self._lock:
            serial = f"{self._id_prefix}{next(self._serials)}"
        request = Request(
            request_id=serial,
            prompt_token_ids=token_ids,
            params=_NO_SAMPLING,
            stop_token_ids=(),
            max_total_tokens=len(token_ids),
            arrival_time=time.monotonic(),
            priority=read_number("priority", priority, _PRIORITY),
            pooling=pooling,
            second_from=second_from,
            encoder=encoder,
            num_encoder_entries=num_entries,
        )
        check_fits(request, info.config.cache)
        text = prompt if isinstance(prompt, str) else None
        return Submission(request_id or f"request-{self._name}-{serial}", text, (request,))

    def check_again(self, submission: Submission) -> None:
        """Called just before it starts: the engine may have been restarted with less memory since it was resolved."""
        check_fits(submission.requests[0], self._info().config.cache)

    def _token_ids(self, prompt: Any, info: EngineInfo, num_drawn: int = 1) -> tuple[int, ...]:
        if isinstance(prompt, EncoderPrompt):
            prompt = prompt.token_ids
        if isinstance(prompt, str):
            return tuple(_tokenizer_of(info).encode(prompt))
        if (
            isinstance(prompt, bytes | bytearray)
            or not hasattr(prompt, "__len__")
            or not hasattr(prompt, "__getitem__")
        ):
            raise RequestError(f"the prompt must be a text or a list of token ids, not {describe_value(prompt)}")
        _check_length(len(prompt), info, num_drawn)
        return _read_ids("prompt", prompt)


def _check_structure(structure: StructuredOutput, info: EngineInfo) -> None:
    if info.tokenizer is None:
        raise RequestError("structured output needs a tokenizer, which a bare shape does not have")
    if not info.eos_token_ids:
        raise RequestError("structured output needs an end-of-sequence token, which this model does not have")
    if (refusal := find_refusal(structure)) is not None:
        raise RequestError(refusal)


def _tokenizer_of(info: EngineInfo) -> Tokenizer:
    if info.tokenizer is None:
        raise RequestError("this engine runs a bare shape and has no tokenizer; pass token ids")
    return info.tokenizer


def _read_id(request_id: Any) -> str | None:
    if request_id is None:
        return None
    if not isinstance(request_id, str) or not 0 < len(request_id) <= _MAX_ID_LENGTH or not is_valid_text(request_id):
        raise RequestError(
            f"request_id must be a text of 1 to {_MAX_ID_LENGTH} characters, not {describe_value(request_id)}"
        )
    return str(request_id)


def _read_encoder_input(prompt: Any, info: EngineInfo) -> tuple[EncoderInput | None, int]:
    """What the encoder reads, and the entries of its output."""
    shape = info.config.model.source_encoder
    if not isinstance(prompt, EncoderPrompt):
        if shape is not None:
            raise RequestError("this model has an encoder: give an EncoderPrompt with the encoder's input")
        return None, 0
    if shape is None:
        raise RequestError("this model has no encoder; give a text or token ids, not an EncoderPrompt")
    if not isinstance(prompt.encoder, EncoderInput):
        raise RequestError(f"the encoder's input must be an EncoderInput, not {describe_value(prompt.encoder)}")
    bins, frames = prompt.encoder.features.shape
    if bins != shape.num_bins or not 0 < frames <= shape.max_frames or frames % shape.frames_per_entry:
        raise RequestError(
            f"the encoder's input has shape [{bins}, {frames}]; the model reads [{shape.num_bins}, up to "
            f"{shape.max_frames}], and a multiple of {shape.frames_per_entry} frames"
        )
    return prompt.encoder, frames // shape.frames_per_entry


def _check_length(num_tokens: int, info: EngineInfo, num_drawn: int = 1) -> None:
    """``num_drawn``: of tokens that there must be room for after the prompt."""
    limit = info.config.scheduler.max_model_len
    if not num_tokens:
        raise RequestError("the prompt is empty; give at least one token")
    if num_tokens + num_drawn > limit:
        hint = "" if num_drawn else " or set truncate_prompt_tokens"
        raise RequestError(f"the prompt has {num_tokens} tokens, the context holds {limit}; shorten the prompt{hint}")


def _read_ids(name: str, values: Sequence[Any]) -> tuple[int, ...]:
    """Plain integers, also from numpy and torch. Booleans, floats and texts are refused."""
    if set(map(type, values)) == {int}:
        return tuple(values)
    found = []
    for value in values:
        try:
            found.append(operator.index(value))
        except Exception:
            raise RequestError(f"{name} holds {describe_value(value)}, which is not a token id") from None
        if isinstance(value, bool):
            raise RequestError(f"{name} holds {value}, which is not a token id")
    return tuple(found)


def _max_total_tokens(prompt_len: int, num_encoder_entries: int, max_tokens: int | None, info: EngineInfo) -> int:
    limit = info.config.scheduler.max_model_len
    if max_tokens is None:
        # Without max_tokens take what the cache can hold, but leave room for at least one token.
        return max(prompt_len + 1, min(limit, info.config.cache.num_tokens_beside(num_encoder_entries)))
    return min(prompt_len + max_tokens, limit)


def _bad_word_ids(bad_words: Sequence[str], info: EngineInfo) -> tuple[tuple[int, ...], ...]:
    """Each word with and without a space before it, which tokenizers encode differently."""
    if bad_words and info.tokenizer is None:
        raise RequestError("bad_words need a tokenizer, which a bare shape does not have")
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        for text in (word, " " + word.lstrip()):
            assert info.tokenizer is not None
            token_ids = tuple(info.tokenizer.encode(text, add_special_tokens=False))
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad word {describe_value(word)} has {len(token_ids)} tokens; "
                    f"at most {MAX_BAD_WORD_TOKENS} are supported"
                )
            if token_ids:
                found[token_ids] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(found)} spellings, counted with and without a space before; "
            f"at most {MAX_BAD_WORDS} are supported"
        )
    return tuple(found)
