"""The routes for vectors, scores, rankings and classes of texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from slipstream.engine.client import Prompt, Submission
from slipstream.engine.pooled_prompt import TextOptions
from slipstream.engine.scores import PairScores
from slipstream.errors import RequestError
from slipstream.pooling import PoolingParams
from slipstream.server.answer_writer import AnswerPlan
from slipstream.server.embeddings import EmbeddingAnswer
from slipstream.server.errors import ApiError
from slipstream.server.http.exchange import HttpRequest
from slipstream.server.params import prompts_of
from slipstream.server.pooled_protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PooledFields,
    RerankRequest,
    ScoreRequest,
)
from slipstream.server.routes import Resolve, Route, RouteContext, read_request
from slipstream.server.scores import ClassAnswer, PooledAnswer, RerankAnswer, ScoreAnswer


def read_embeddings(context: RouteContext, request: HttpRequest) -> Resolve:
    body: EmbeddingRequest = read_request(request, EmbeddingRequest)
    context.model.check(body.model)
    texts: list[Prompt] = list(prompts_of(body.input))
    context.gate.check_room(len(texts))
    params = PoolingParams(body.pooling, body.normalize, body.dimensions)
    options = TextOptions(body.truncate_prompt_tokens, body.prompt_name)

    def resolve() -> AnswerPlan:
        answer = EmbeddingAnswer(context.ids.new("embd"), context.model.name, encoding=body.encoding_format)
        prepare = partial(_prepare_vector, context, params, body.priority, options)
        return context.plan_pooled(answer, texts, prepare)

    return resolve


def read_rerank(context: RouteContext, request: HttpRequest) -> Resolve:
    body: RerankRequest = read_request(request, RerankRequest)
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    options = _options_of(context, body, len(documents), body.instruction)

    def resolve() -> AnswerPlan:
        plan = _plan_pairs(context, [body.query], documents)
        answer = RerankAnswer(
            context.ids.new("rerank"),
            context.model.name,
            plan=plan,
            documents=documents,
            top_n=body.top_n,
            returns_documents=body.return_documents,
        )
        return _plan_scores(context, answer, plan, body.priority, options)

    return resolve


def read_score(context: RouteContext, request: HttpRequest) -> Resolve:
    body: ScoreRequest = read_request(request, ScoreRequest)
    first = _either("text_1", body.text_1, "queries", body.queries)
    second = _either("text_2", body.text_2, "documents", body.documents)
    options = _options_of(context, body, len(second), body.instruction)

    def resolve() -> AnswerPlan:
        plan = _plan_pairs(context, first, second)
        answer = ScoreAnswer(context.ids.new("score"), context.model.name, plan=plan)
        return _plan_scores(context, answer, plan, body.priority, options)

    return resolve


def read_classify(context: RouteContext, request: HttpRequest) -> Resolve:
    body: ClassifyRequest = read_request(request, ClassifyRequest)
    texts: list[Prompt] = list(prompts_of(body.input))
    options = _options_of(context, body, len(texts), None)

    def resolve() -> AnswerPlan:
        pooling = context.client.pooling
        try:
            labels = pooling.labels
        except RequestError as error:
            raise ApiError(400, str(error)) from error
        answer = ClassAnswer(context.ids.new("classify"), context.model.name, labels=labels)
        return context.plan_pooled(answer, texts, partial(_prepare_scored, context, body.priority, options))

    return resolve


def _options_of(context: RouteContext, body: PooledFields, num_items: int, instruction: str | None) -> TextOptions:
    context.model.check(body.model)
    context.gate.check_room(num_items)
    return TextOptions(body.truncate_prompt_tokens, instruction=instruction)


def _either(name: str, text: str | list[str] | None, other: str, others: str | list[str] | None) -> list[str]:
    if (text is None) == (others is None):
        raise ApiError(400, f"give either {name} or {other}", param=name)
    given = others if text is None else text
    return [given] if isinstance(given, str) else list(given or ())


def _plan_pairs(context: RouteContext, first: Sequence[str], second: Sequence[str]) -> PairScores:
    try:
        return PairScores.plan(context.client.pooling, first, second)
    except RequestError as error:
        raise ApiError(400, str(error)) from error


def _plan_scores(
    context: RouteContext, answer: PooledAnswer, plan: PairScores, priority: int, options: TextOptions
) -> AnswerPlan:
    prepare = (
        partial(_prepare_scored, context, priority, options)
        if plan.are_scored
        else partial(_prepare_vector, context, PoolingParams(), priority, options)
    )
    return context.plan_pooled(answer, plan.items, prepare)


def _prepare_vector(
    context: RouteContext, params: PoolingParams, priority: int, options: TextOptions, text: Prompt, own_id: str
) -> Submission:
    return context.client.prepare_pooled(text, params, own_id, priority, options)


def _prepare_scored(
    context: RouteContext, priority: int, options: TextOptions, item: Prompt, own_id: str
) -> Submission:
    return context.client.prepare_scored(item, own_id, priority, options)


POOLED_ROUTES: dict[str, Route] = {
    "/v1/embeddings": read_embeddings,
    "/rerank": read_rerank,
    "/v1/rerank": read_rerank,
    "/v2/rerank": read_rerank,
    "/score": read_score,
    "/v1/score": read_score,
    "/classify": read_classify,
}
