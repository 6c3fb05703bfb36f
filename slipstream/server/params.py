"""From the fields of a request to the engine's parameters."""

from __future__ import annotations

from typing import Any

from slipstream.sampling_params import MAX_SEED, SamplingParams
from slipstream.server.errors import ApiError
from slipstream.server.protocol import ChatCompletionRequest, ChatMessage, CompletionRequest, SamplingFields
from slipstream.server.sampling_fields import DECLARED


def sampling_params(body: SamplingFields, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if any(not text for text in stop):
        raise ApiError(400, "stop must not hold empty texts", param="stop")
    return SamplingParams(
        **{name: getattr(body, name) for name in DECLARED},
        max_tokens=max_tokens,
        n=body.n,
        seed=None if body.seed is None else body.seed % (MAX_SEED + 1),
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
        speculate=body.speculate is not False,
        max_k=body.max_k,
        extra=body.extra or {},
    )


def completion_params(body: CompletionRequest) -> SamplingParams:
    return sampling_params(body, body.max_tokens, body.logprobs)


def chat_params(body: ChatCompletionRequest) -> SamplingParams:
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(
            400,
            f"response_format '{body.response_format.type}' is not supported yet; leave it out or use 'text'",
            param="response_format",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    return sampling_params(body, min(limits, default=None), (body.top_logprobs or 0) if body.logprobs else None)


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(part, int) for part in prompt):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in messages]
