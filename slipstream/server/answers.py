"""Outputs of the engine in the words of the API: whole answers, and chunks of a stream."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.server.generation import Generation
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
    TokenLogprob,
    TopLogprob,
    Usage,
)
from slipstream.types import Completion, Logprob, Logprobs, RequestOutput

_FLOOR = -9999.0  # JSON has no infinity


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
    """Figures of a choice that has ended."""
    if choice.speculation is None or choice.finish_reason is None:
        return None
    return Speculation(**choice.speculation.as_dict())


def _reason(choice: Completion) -> FinishReason | None:
    if choice.finish_reason is None:
        return None
    return "length" if choice.finish_reason == "length" else "stop"


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _FLOOR


def _top(logprob: Logprob) -> TopLogprob:
    # A token may be part of a character; its bytes are then not those of the text it is shown as.
    whole = "\N{REPLACEMENT CHARACTER}" not in logprob.text
    raw = list(logprob.text.encode("utf-8", "replace")) if whole else None
    return TopLogprob(token=logprob.text, logprob=_finite(logprob.logprob), bytes=raw)


def _chat_logprobs(entries: Sequence[Logprobs], num_top: int) -> ChatLogprobs:
    content = []
    for entry in entries:
        token = next(iter(entry.values()))
        likeliest = sorted(entry.values(), key=lambda logprob: logprob.rank)[:num_top]
        content.append(TokenLogprob(**_top(token).model_dump(), top_logprobs=[_top(one) for one in likeliest]))
    return ChatLogprobs(content=content)


def _completion_logprobs(entries: Sequence[Logprobs], offset: int) -> CompletionLogprobs:
    tokens = [next(iter(entry.values())) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return CompletionLogprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[_finite(token.logprob) for token in tokens],
        top_logprobs=[{one.text: _finite(one.logprob) for one in entry.values()} for entry in entries],
        text_offset=offsets,
    )


@dataclass
class _Told:
    """How much of a choice the client knows."""

    num_tokens: int = 0
    num_characters: int = 0  # of those tokens' texts
    ended: bool = False


class _News(NamedTuple):
    choice: Completion
    logprobs: Sequence[Logprobs] | None  # of the tokens that were not told yet
    offset: int  # where their text begins


@dataclass
class Answer:
    """What all chunks of one answer share, and how far each choice has been told."""

    request_id: str
    model: str
    num_top: int = 0
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _told: dict[int, _Told] = field(default_factory=dict)

    def _news(self, index: int, choice: Completion) -> _News | None:
        """What there is to tell of a choice; None if nothing. An end is told once."""
        told = self._told.setdefault(index, _Told())
        logprobs = None if choice.logprobs is None else choice.logprobs[told.num_tokens :]
        if told.ended or not (choice.delta_text or logprobs or choice.finish_reason):
            return None
        news = _News(choice, logprobs, told.num_characters)
        told.num_tokens = len(choice.token_ids)
        told.num_characters += sum(len(next(iter(entry.values())).text) for entry in logprobs or ())
        told.ended = choice.finish_reason is not None
        return news


class CompletionAnswer(Answer):
    def whole(self, generation: Generation) -> CompletionResponse:
        choices = []
        for i, output in sorted(generation.latest.items()):
            for choice in output.outputs:
                logprobs = None if choice.logprobs is None else _completion_logprobs(choice.logprobs, 0)
                choices.append(self._choice(i * len(output.outputs) + choice.index, choice, choice.text, logprobs))
        return self._response(choices, usage_of(generation))

    def chunks(self, i: int, output: RequestOutput) -> Iterator[CompletionResponse]:
        for choice in output.outputs:
            index = i * len(output.outputs) + choice.index
            if (news := self._news(index, choice)) is not None:
                logprobs = None if news.logprobs is None else _completion_logprobs(news.logprobs, news.offset)
                yield self._response([self._choice(index, choice, choice.delta_text, logprobs)], None)

    def last(self, generation: Generation) -> CompletionResponse:
        return self._response([], usage_of(generation))

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
                index=choice.index,
                message=AssistantMessage(content=choice.text),
                logprobs=None if choice.logprobs is None else _chat_logprobs(choice.logprobs, self.num_top),
                finish_reason=_reason(choice),
                stop_reason=choice.stop_reason,
                speculation=_speculation(choice),
            )
            for choice in generation.latest[0].outputs
        ]
        return ChatCompletionResponse(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage_of(generation),
            system_fingerprint=self.fingerprint,
        )

    def first(self, n: int) -> ChatCompletionChunk:
        """The role, before there is any text."""
        role = ChatDelta(role="assistant", content="")
        return self._chunk([ChatChunkChoice(index=i, delta=role) for i in range(n)], None)

    def chunks(self, _i: int, output: RequestOutput) -> Iterator[ChatCompletionChunk]:
        for choice in output.outputs:
            if (news := self._news(choice.index, choice)) is not None:
                told = ChatChunkChoice(
                    index=choice.index,
                    delta=ChatDelta(content=choice.delta_text or None),
                    logprobs=_chat_logprobs(news.logprobs, self.num_top) if news.logprobs else None,
                    finish_reason=_reason(choice),
                    stop_reason=choice.stop_reason,
                    speculation=_speculation(choice),
                )
                yield self._chunk([told], None)

    def last(self, generation: Generation) -> ChatCompletionChunk:
        return self._chunk([], usage_of(generation))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self.fingerprint,
        )
