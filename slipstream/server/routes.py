"""The routes that generate: parsing, checking and resolving a body, off the event loop where it is large."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream import __version__
from slipstream.config import EngineConfig
from slipstream.engine.client import EngineClient, Prompt, Submission
from slipstream.errors import RequestError
from slipstream.sampling_params import SamplingParams
from slipstream.server.answer_writer import AnswerPlan
from slipstream.server.answers import Answer, ChatAnswer, CompletionAnswer
from slipstream.server.errors import ApiError
from slipstream.server.generation import Gate, Generation
from slipstream.server.http.exchange import HttpRequest
from slipstream.server.json_body import read_body
from slipstream.server.params import chat_params, completion_params, plain_messages, prompts_of
from slipstream.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields


class ModelName:
    """The name of this server's model, and the error for any other name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, asked: str | None) -> None:
        if asked is not None and asked != self.name:
            raise ApiError(404, f"there is no model '{asked}' here, only '{self.name}'", param="model")


class AnswerIds:
    """Ids of responses: unique within a server, whichever of its front ends made them."""

    def __init__(self, front_end: int) -> None:
        self.started = int(time.time())
        self._front_end = front_end
        self._serials = itertools.count()

    def new(self, prefix: str) -> str:
        return f"{prefix}-{self.started:x}-{self._front_end:x}-{next(self._serials):x}"


@dataclass(frozen=True)
class RouteContext:
    client: EngineClient
    gate: Gate
    model: ModelName
    ids: AnswerIds
    fingerprint: str  # of the numbers that make a response

    def answer_options(self, body: CompletionRequest | ChatCompletionRequest) -> dict[str, Any]:
        wants_logprobs = body.logprobs is not None and body.logprobs is not False
        return {
            "fingerprint": self.fingerprint,
            "tokenizer": self.client.tokenizer if wants_logprobs else None,
            "skip_special_tokens": body.skip_special_tokens,
        }

    def plan(self, body: SamplingFields, answer: Answer, prompts: list[Prompt], params: SamplingParams) -> AnswerPlan:
        submissions = self._prepare(
            prompts, answer, lambda prompt, own_id: self.client.prepare(prompt, params, own_id, body.priority)
        )
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return AnswerPlan(Generation(submissions), answer, body.stream, include_usage)

    def plan_pooled(
        self, answer: Answer, items: Sequence[Any], prepare: Callable[[Any, str], Submission]
    ) -> AnswerPlan:
        """For texts that become vectors or scores."""
        return AnswerPlan(Generation(self._prepare(items, answer, prepare)), answer, False, False)

    @staticmethod
    def _prepare(prompts: Sequence[Any], answer: Answer, prepare: Callable[[Any, str], Submission]) -> list[Submission]:
        """Check everything before anything runs."""
        submissions = []
        for i, prompt in enumerate(prompts):
            own_id = answer.request_id if len(prompts) == 1 else f"{answer.request_id}-{i}"
            try:
                submissions.append(prepare(prompt, own_id))
            except RequestError as error:
                raise ApiError(400, f"prompt {i}: {error}" if len(prompts) > 1 else str(error)) from error
        return submissions


class Resolve(Protocol):
    """The second half of a route: tokenise the parsed body and check it against the engine's limits."""

    def __call__(self) -> AnswerPlan: ...


Route = Callable[[RouteContext, HttpRequest], Resolve]


def read_request(request: HttpRequest, kind: type[Any]) -> Any:
    content_type, has_origin = request.header(b"content-type"), request.header(b"origin") is not None
    return read_body(request.body, content_type, has_origin, kind)


def read_completion(context: RouteContext, request: HttpRequest) -> Resolve:
    body: CompletionRequest = read_request(request, CompletionRequest)
    context.model.check(body.model)
    prompts: list[Prompt] = list(prompts_of(body.prompt))
    context.gate.check_room(len(prompts) * body.n)
    params = completion_params(body)

    def resolve() -> AnswerPlan:
        answer = CompletionAnswer(context.ids.new("cmpl"), context.model.name, **context.answer_options(body))
        return context.plan(body, answer, prompts, params)

    return resolve


def read_chat(context: RouteContext, request: HttpRequest) -> Resolve:
    body: ChatCompletionRequest = read_request(request, ChatCompletionRequest)
    context.model.check(body.model)
    context.gate.check_room(body.n)
    params = chat_params(body)

    def resolve() -> AnswerPlan:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        prompt = context.client.tokenizer.encode_chat(
            plain_messages(body.messages),
            tools=None if body.tool_choice == "none" else tools,
            variables=body.chat_template_kwargs,
        )
        options = context.answer_options(body)
        answer = ChatAnswer(context.ids.new("chatcmpl"), context.model.name, body.top_logprobs or 0, **options)
        return context.plan(body, answer, [prompt], params)

    return resolve


ROUTES: dict[str, Route] = {
    "/v1/completions": read_completion,
    "/v1/chat/completions": read_chat,
}


def fingerprint_of(config: EngineConfig, model: str) -> str:
    """Says which numerics make the responses: of two engines with equal ones the texts agree as far as ``exact`` says.

    Model, formats of weights, types, device and version are in a hash; whether results are exact can be read.
    """
    network, speculative = config.model, config.speculative
    shape = (network.architecture, network.num_layers, network.hidden_size, network.vocab_size, network.keys_in)
    made_by = (config.weight_formats, config.dtype, config.attention_backend, config.device, config.processor)
    digest = hashlib.sha256(repr((__version__, model, *shape, *made_by, config.exact)).encode()).hexdigest()[:10]
    kinds = {"exact": config.exact, "synthetic": speculative is not None and speculative.is_synthetic}
    return "-".join(["slipstream", __version__, digest, *(name for name, is_so in kinds.items() if is_so)])
