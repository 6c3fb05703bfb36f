"""From the fields of a request to the engine's parameters."""

from __future__ import annotations

from typing import Any

from slipstream.errors import RequestError
from slipstream.grammar.guidance import find_refusal
from slipstream.sampling_params import MAX_SEED, SamplingParams
from slipstream.server.errors import ApiError
from slipstream.server.protocol import ChatCompletionRequest, ChatMessage, CompletionRequest, SamplingFields
from slipstream.server.sampling_fields import DECLARED
from slipstream.structured import StructuredOutput


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
        structured=_structure_of(body),
        extra=body.extra or {},
    )


def completion_params(body: CompletionRequest) -> SamplingParams:
    return sampling_params(body, body.max_tokens, body.logprobs)


def chat_params(body: ChatCompletionRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    return sampling_params(body, min(limits, default=None), (body.top_logprobs or 0) if body.logprobs else None)


def _structure_of(body: SamplingFields) -> StructuredOutput | None:
    """What the text must be. A refusal names the field, and the schema's keyword."""
    found: dict[str, dict[str, Any]] = {}
    if isinstance(body, ChatCompletionRequest) and (form := body.response_format) is not None:
        if form.type == "json_object":
            found["response_format"] = {"json": True}
        elif form.type == "json_schema":
            if form.json_schema is None or form.json_schema.schema_ is None:
                raise ApiError(400, "response_format json_schema needs json_schema.schema", param="response_format")
            found["response_format"] = {"json": form.json_schema.schema_}
    if (given := body.structured_outputs) is not None:
        values: dict[str, Any] = {
            "json": given.json_,
            "regex": given.regex,
            "choice": given.choice,
            "grammar": given.grammar,
            "disable_any_whitespace": given.disable_any_whitespace,
        }
        if given.json_object:
            values["json"] = True if given.json_ is None else given.json_
        found["structured_outputs"] = {name: value for name, value in values.items() if value is not None}
    if not found:
        return None
    if len(found) > 1:
        raise ApiError(400, "give either response_format or structured_outputs, not both", param="structured_outputs")
    ((name, values),) = found.items()
    try:
        structure = StructuredOutput(**values)
    except RequestError as error:
        raise ApiError(400, f"{name}: {error}", param=name) from error
    if (refusal := find_refusal(structure)) is not None:
        raise ApiError(400, f"{name}: {refusal}", param=name)
    return structure


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(part, int) for part in prompt):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in messages]
