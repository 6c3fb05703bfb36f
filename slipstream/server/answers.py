"""Outputs of the engine in the API's format: complete responses, and chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from pydantic import BaseModel

from slipstream.engine.text_stream import TextStream
from slipstream.output import Completion, Logprobs
from slipstream.server.generation import Generation
from slipstream.server.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from slipstream.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    Speculation,
    Usage,
)
from slipstream.text.tokenizer import Tokenizer


def usage_of(generation: Generation) -> Usage:
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    details = PromptTokensDetails(cached_tokens=generation.num_cached_tokens)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=details,
        completion_tokens_details=_draft_details(generation),
    )


def _draft_details(generation: Generation) -> CompletionTokensDetails | None:
    drafts = generation.drafts
    if not drafts:
        return None
    num_drafts, num_accepted = sum(d.num_drafts for d in drafts), sum(d.num_accepted for d in drafts)
    return CompletionTokensDetails(
        accepted_prediction_tokens=num_accepted, rejected_prediction_tokens=num_drafts - num_accepted
    )


def _speculation(choice: Completion) -> Speculation | None:
    """Speculation statistics of a choice that has ended."""
    if choice.speculation is None or choice.finish_reason is None:
        return None
    return Speculation(**choice.speculation.as_dict())


def _reason(choice: Completion) -> FinishReason | None:
    if choice.finish_reason is None:
        return None
    return "length" if choice.finish_reason == "length" else "stop"


# Fields left out of complete responses where the engine does not speculate.
_OF_DRAFTS: dict[str, Any] = {"choices": {"__all__": {"speculation"}}, "usage": {"completion_tokens_details"}}
_TEXT = "\N{REPLACEMENT CHARACTER}text\N{REPLACEMENT CHARACTER}"  # placeholder for the text in a chunk
_DONE = b"data: [DONE]\n\n"


@dataclass
class _Told:
    """How much of a choice the client has received."""

    num_tokens: int = 0
    offsets: TextOffsets | None = None  # of its tokens, if log probabilities are returned
    plain: tuple[bytes, bytes] | None = None  # bytes before and after the text in a text-only chunk


@dataclass
class Answer:
    """What all chunks of one answer share, and how much of each choice was sent. Choices are identified by index."""

    request_id: str
    model: str
    num_top: int = 0
    fingerprint: str | None = None
    tokenizer: Tokenizer | None = None  # for log probabilities
    skip_special_tokens: bool = True  # in the text
    created: int = field(default_factory=lambda: int(time.time()))
    _told: dict[int, _Told] = field(default_factory=dict)

    def told(self, index: int) -> _Told:
        if (told := self._told.get(index)) is None:
            told = self._told[index] = _Told()
        return told

    # --- what differs between completions and chat

    def whole(self, generation: Generation) -> BaseModel:
        raise AssertionError("a subclass builds the complete response")

    def chunk(self, index: int, choice: Completion, text: str, logprobs: Sequence[Logprobs] | None) -> BaseModel:
        """One chunk: ``choice`` says how the choice ended, if it did; ``text`` and ``logprobs`` hold what is new."""
        raise AssertionError("a subclass builds its chunks")

    def usage_chunk(self, usage: Usage) -> BaseModel:
        raise AssertionError("a subclass builds its usage chunk")

    def opening(self, num_choices: int) -> bytes:
        """Events before any text."""
        return b""

    def take_end(self, index: int, stream: TextStream) -> None:
        """A choice has ended; told before the whole answer is made."""

    # --- bytes

    def whole_bytes(self, generation: Generation, has_drafts: bool) -> bytes:
        answer = self.whole(generation)
        return answer.model_dump_json(exclude=None if has_drafts else _OF_DRAFTS).encode()

    def event(self, index: int, choice: Completion, text: str) -> bytes:
        """One event with all that is new in a choice; empty if nothing is."""
        told = self.told(index)
        num_told, told.num_tokens = told.num_tokens, len(choice.token_ids)
        if choice.finish_reason is None and choice.logprobs is None:
            return self._text_event(index, told, text) if text else b""
        logprobs = None if choice.logprobs is None else choice.logprobs[num_told:]
        if not (text or logprobs or choice.finish_reason):
            return b""
        return as_event(self.chunk(index, choice, text, logprobs))

    def _text_event(self, index: int, told: _Told, text: str) -> bytes:
        """The common case, a chunk that has only text: joined from bytes that are the same for all its tokens."""
        if told.plain is None:
            before, _, after = as_event(self.chunk(index, Completion(index), _TEXT, None)).rpartition(_TEXT.encode())
            told.plain = before[:-1], after[1:]  # without the quotes, which come with the text
        before, after = told.plain
        return b"%b%b%b" % (before, encode_basestring(text).encode(), after)

    def closing(self, generation: Generation, include_usage: bool) -> bytes:
        return (as_event(self.usage_chunk(usage_of(generation))) if include_usage else b"") + _DONE


def as_event(chunk: BaseModel) -> bytes:
    return b"data: %b\n\n" % chunk.model_dump_json(exclude_none=True).encode()


class CompletionAnswer(Answer):
    def whole(self, generation: Generation) -> CompletionResponse:
        choices = [
            self._choice(index, choice, choice.text, self._logprobs(index, choice.logprobs))
            for index, choice in enumerate(generation.completions)
        ]
        return self._response(choices, usage_of(generation))

    def chunk(
        self, index: int, choice: Completion, text: str, logprobs: Sequence[Logprobs] | None
    ) -> CompletionResponse:
        return self._response([self._choice(index, choice, text, self._logprobs(index, logprobs))], None)

    def usage_chunk(self, usage: Usage) -> CompletionResponse:
        return self._response([], usage)

    def _logprobs(self, index: int, entries: Sequence[Logprobs] | None) -> CompletionLogprobs | None:
        """Entries of tokens that were not sent yet. Their text offsets continue after the last token sent."""
        if entries is None or self.tokenizer is None:
            return None
        told = self.told(index)
        told.offsets = told.offsets or TextOffsets(self.tokenizer, self.skip_special_tokens)
        return completion_logprobs(entries, self.tokenizer, told.offsets)

    def _choice(
        self, index: int, choice: Completion, text: str, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=_reason(choice),
            stop_reason=choice.stop_reason,
            speculation=_speculation(choice),
        )

    def _response(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self.fingerprint,
        )


class ChatAnswer(Answer):
    def whole(self, generation: Generation) -> ChatCompletionResponse:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=choice.text),
                logprobs=self._logprobs(choice.logprobs),
                finish_reason=_reason(choice),
                stop_reason=choice.stop_reason,
                speculation=_speculation(choice),
            )
            for index, choice in enumerate(generation.completions)
        ]
        return ChatCompletionResponse(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage_of(generation),
            system_fingerprint=self.fingerprint,
        )

    def opening(self, num_choices: int) -> bytes:
        """The role, before there is any text."""
        role = ChatDelta(role="assistant", content="")
        return as_event(self._chunk([ChatChunkChoice(index=i, delta=role) for i in range(num_choices)], None))

    def chunk(
        self, index: int, choice: Completion, text: str, logprobs: Sequence[Logprobs] | None
    ) -> ChatCompletionChunk:
        told = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=text or None),
            logprobs=self._logprobs(logprobs or None),
            finish_reason=_reason(choice),
            stop_reason=choice.stop_reason,
            speculation=_speculation(choice),
        )
        return self._chunk([told], None)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def _logprobs(self, entries: Sequence[Logprobs] | None) -> ChatLogprobs | None:
        if entries is None or self.tokenizer is None:
            return None
        return chat_logprobs(entries, self.tokenizer, self.num_top)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self.fingerprint,
        )
