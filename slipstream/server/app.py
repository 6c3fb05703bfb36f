"""The ASGI application: routes that are answered without the engine, and the OpenAPI schema of all routes.

Routes that generate are answered before a request comes here (``routes.py``); they are declared for the schema.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Response

from slipstream import __version__
from slipstream.engine.client import EngineClient
from slipstream.server import pooled_protocol, protocol
from slipstream.server.errors import ApiError, install_handlers
from slipstream.server.json_body import JsonRoute
from slipstream.server.metrics import CONTENT_TYPE, ServerMetrics
from slipstream.server.params import plain_messages
from slipstream.server.routes import ModelName
from slipstream.server.speech_form import ROUTES as SPEECH_ROUTES
from slipstream.server.speech_schema import TranscriptionResponse, describe_form

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": protocol.ErrorResponse, "description": "The request cannot be served; the message says why."},
    "503": {"model": protocol.ErrorResponse, "description": "The engine is being restarted."},
}
# Of one event: its data is a chunk in JSON, an error in JSON, or [DONE].
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_SSE = {"text/event-stream": {"schema": _EVENT}}


@dataclass(frozen=True)
class AppContext:
    client: EngineClient
    model: ModelName
    started: int
    metrics: ServerMetrics

    @property
    def failure(self) -> str | None:
        """Why no request can be answered now; None if requests can be answered."""
        return getattr(self.client.running, "trouble", None)

    def card(self) -> protocol.ModelCard:
        max_model_len = self.client.config.scheduler.max_model_len
        return protocol.ModelCard(id=self.model.name, created=self.started, max_model_len=max_model_len)

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """The model may have more ids than the tokenizer, or fewer; an id beyond both is invalid."""
        vocab_size = max(self.client.config.model.vocab_size, self.client.tokenizer.vocab_size)
        if token_ids and max(token_ids) >= vocab_size:
            bad = next(one for one in token_ids if one >= vocab_size)
            raise ApiError(400, f"tokens holds {bad}, which is not a token id below {vocab_size}", param="tokens")


def create_app(context: AppContext) -> FastAPI:
    app = FastAPI(title="Slipstream", version=__version__, responses=_ERRORS)
    app.router.route_class = JsonRoute
    install_handlers(app)
    _declare_generation(app)
    _declare_speech(app)
    _add_tokens(app, context)
    _add_status(app, context)
    return app


def _declare_generation(app: FastAPI) -> None:
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": _SSE}}

    @app.post("/v1/completions", response_model=protocol.CompletionResponse, responses=streamed)
    async def completions(body: protocol.CompletionRequest) -> None:
        raise ApiError(500, "this route is answered by the server, not by its application")

    @app.post("/v1/chat/completions", response_model=protocol.ChatCompletionResponse, responses=streamed)
    async def chat_completions(body: protocol.ChatCompletionRequest) -> None:
        raise ApiError(500, "this route is answered by the server, not by its application")

    @app.post("/v1/embeddings", response_model=pooled_protocol.EmbeddingResponse)
    async def embeddings(body: pooled_protocol.EmbeddingRequest) -> None:
        raise ApiError(500, "this route is answered by the server, not by its application")

    # Clients expect the same routes with a version before them.
    @app.post("/v2/rerank", response_model=pooled_protocol.RerankResponse, include_in_schema=False)
    @app.post("/v1/rerank", response_model=pooled_protocol.RerankResponse, include_in_schema=False)
    @app.post("/rerank", response_model=pooled_protocol.RerankResponse)
    async def rerank(body: pooled_protocol.RerankRequest) -> None:
        raise ApiError(500, "this route is answered by the server, not by its application")

    @app.post("/v1/score", response_model=pooled_protocol.ScoreResponse, include_in_schema=False)
    @app.post("/score", response_model=pooled_protocol.ScoreResponse)
    async def score(body: pooled_protocol.ScoreRequest) -> None:
        raise ApiError(500, "this route is answered by the server, not by its application")

    @app.post("/classify", response_model=pooled_protocol.ClassifyResponse)
    async def classify(body: pooled_protocol.ClassifyRequest) -> None:
        raise ApiError(500, "this route is answered by the server, not by its application")


def _declare_speech(app: FastAPI) -> None:
    text = {"text/plain": {"schema": {"type": "string"}}}

    for path, task in SPEECH_ROUTES.items():
        form = {"multipart/form-data": {"schema": describe_form(task)}}
        extra = {"requestBody": {"content": form, "required": True}}
        streamed = _SSE if task == "transcribe" else {}

        @app.post(
            path,
            response_model=TranscriptionResponse,
            responses={200: {"content": {**text, **streamed}}},
            openapi_extra=extra,
            name=task,
        )
        async def transcribe() -> None:
            raise ApiError(500, "this route is answered by the server, not by its application")


def _add_tokens(app: FastAPI, context: AppContext) -> None:
    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest) -> protocol.TokenizeResponse:
        context.model.check(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        tokenizer = context.client.tokenizer
        if body.messages is not None:
            messages = plain_messages(body.messages)
            tokens = await asyncio.to_thread(
                tokenizer.encode_chat, messages, add_generation_prompt=body.add_generation_prompt
            )
        else:
            assert body.prompt is not None
            tokens = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens)
        limit = context.client.config.scheduler.max_model_len
        return protocol.TokenizeResponse(count=len(tokens), max_model_len=limit, tokens=tokens)

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest) -> protocol.DetokenizeResponse:
        context.model.check(body.model)
        context.check_token_ids(body.tokens)
        decode = context.client.tokenizer.decode
        text = await asyncio.to_thread(decode, body.tokens, body.skip_special_tokens)
        return protocol.DetokenizeResponse(prompt=text)


def _add_status(app: FastAPI, context: AppContext) -> None:
    @app.get("/v1/models")
    async def models() -> protocol.ModelList:
        return protocol.ModelList(data=[context.card()])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> protocol.ModelCard:
        context.model.check(name)
        return context.card()

    @app.get("/health")
    async def health() -> protocol.Health:
        if (failure := context.failure) is not None:
            raise ApiError(503, failure, headers={"Retry-After": "5"})
        return protocol.Health()

    @app.get("/version")
    async def version() -> protocol.Version:
        return protocol.Version(version=__version__)

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(context.metrics.text(), media_type=CONTENT_TYPE)
