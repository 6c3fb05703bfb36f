"""The routes. Each checks its body, asks the engine, and answers in the words of the API."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from slipstream import __version__
from slipstream.engine.client import EngineClient
from slipstream.engine.process import EngineProcess
from slipstream.server import protocol
from slipstream.server.access_log import CLIENT_GONE, FIGURES, AccessLog, Figures
from slipstream.server.answers import ChatAnswer, CompletionAnswer
from slipstream.server.errors import ApiError, as_api_error, install_handlers
from slipstream.server.generation import ClientGone, Gate, Generation, collect, unless_gone
from slipstream.server.limits import Limits
from slipstream.server.metrics import CONTENT_TYPE, ServerMetrics
from slipstream.server.params import chat_params, completion_params, plain_messages, prompts_of
from slipstream.server.settings import ServerSettings
from slipstream.server.warning_header import WarningHeader
from slipstream.types import SYNTHETIC_WARNING

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": protocol.ErrorResponse, "description": "The request cannot be served; the message says why."},
    "503": {"model": protocol.ErrorResponse, "description": "The engine is being restarted."},
}
# Of one event: its data is a chunk in JSON, an error in JSON, or [DONE].
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_SSE = {"text/event-stream": {"schema": _EVENT}}
# What whole answers do not have where the engine does not draft.
_OF_DRAFTS: dict[str, Any] = {"choices": {"__all__": {"speculation"}}, "usage": {"completion_tokens_details"}}


class Server:
    """One engine behind HTTP."""

    def __init__(self, client: EngineClient, model_name: str, settings: ServerSettings) -> None:
        self.client = client
        self.model_name = settings.served_model_name or model_name
        self.settings = settings
        self.started = int(time.time())
        running = client.running
        speculative = client.config.speculative
        self.drafts = speculative is not None
        self.is_synthetic = speculative is not None and speculative.is_synthetic
        # Answers carry one where it tells them from those of an honest engine.
        self.fingerprint = f"slipstream-{__version__}-synthetic" if self.is_synthetic else None
        self.metrics = ServerMetrics(
            lambda: client.stats, lambda: getattr(running, "num_restarts", 0), self.is_synthetic
        )
        self.gate = Gate(client, self.metrics, settings.max_queue)
        self._ids = itertools.count()

    @property
    def failure(self) -> str | None:
        """Why no request can be taken now; None if they can."""
        running = self.client.running
        return running.failure if isinstance(running, EngineProcess) and not running.is_ready else None

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(404, f"there is no model '{name}' here, only '{self.model_name}'", param="model")

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{self.started:x}-{next(self._ids):x}"

    def card(self) -> protocol.ModelCard:
        max_model_len = self.client.config.scheduler.max_model_len
        return protocol.ModelCard(id=self.model_name, created=self.started, max_model_len=max_model_len)

    async def answer(
        self,
        request: Request,
        generation: Generation,
        answer: CompletionAnswer | ChatAnswer,
        body: protocol.SamplingFields,
    ) -> Response:
        figures = Figures(answer.request_id, generation)
        request.scope[FIGURES] = figures
        try:
            if not body.stream:
                await collect(self.gate, generation, request)
                return JSONResponse(answer.whole(generation).model_dump(exclude=None if self.drafts else _OF_DRAFTS))
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            events = self._events(generation, answer, body.n, include_usage, figures)
            # The first event decides the status: what fails before it is an ordinary error.
            first = await unless_gone(_first(events), request)
            return StreamingResponse(_chain(first, events), media_type="text/event-stream")
        except ClientGone:
            self.gate.release(generation)
            return Response(status_code=CLIENT_GONE)
        except BaseException:
            self.gate.release(generation)
            raise

    async def _events(
        self,
        generation: Generation,
        answer: CompletionAnswer | ChatAnswer,
        n: int,
        include_usage: bool,
        figures: Figures,
    ) -> AsyncGenerator[bytes, None]:
        begun = False
        try:
            async with self.gate.run(generation, every_token=True) as outputs:
                if isinstance(answer, ChatAnswer):
                    begun = True
                    yield _event(answer.first(n))
                async for i, output in outputs:
                    for chunk in answer.chunks(i, output):
                        begun = True
                        yield _event(chunk)
            if include_usage:
                yield _event(answer.last(generation))
            yield b"data: [DONE]\n\n"
        except Exception as error:
            if not begun:
                raise
            known = as_api_error(error)
            figures.status = known.status
            yield f"data: {json.dumps(known.body)}\n\n".encode()


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_none=True).encode() + b"\n\n"


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    try:
        return await anext(events)
    except BaseException:
        await events.aclose()
        raise


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


def create_app(server: Server) -> FastAPI:
    app = FastAPI(title="Slipstream", version=__version__, responses=_ERRORS)
    settings = server.settings
    app.add_middleware(
        Limits,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        api_key=settings.api_key,
    )
    app.add_middleware(AccessLog, metrics=server.metrics, written=settings.log_requests)
    if server.is_synthetic:
        app.add_middleware(WarningHeader, text=SYNTHETIC_WARNING)
    install_handlers(app)
    _add_generation(app, server)
    _add_tokens(app, server)
    _add_status(app, server)
    return app


def _add_generation(app: FastAPI, server: Server) -> None:
    streamed = {200: {"content": _SSE}}

    @app.post("/v1/completions", response_model=protocol.CompletionResponse, responses=streamed)  # type: ignore[arg-type]
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        server.check_model(body.model)
        request_id = server.new_id("cmpl")
        generation = await server.gate.prepare(prompts_of(body), completion_params(body), request_id, body.priority)
        answer = CompletionAnswer(request_id, server.model_name, fingerprint=server.fingerprint)
        return await server.answer(request, generation, answer, body)

    @app.post("/v1/chat/completions", response_model=protocol.ChatCompletionResponse, responses=streamed)  # type: ignore[arg-type]
    async def chat_completions(body: protocol.ChatCompletionRequest, request: Request) -> Response:
        server.check_model(body.model)
        params = chat_params(body)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        prompt = await asyncio.to_thread(
            server.client.tokenizer.encode_chat,
            plain_messages(body.messages),
            tools=None if body.tool_choice == "none" else tools,
            variables=body.chat_template_kwargs,
        )
        request_id = server.new_id("chatcmpl")
        generation = await server.gate.prepare([prompt], params, request_id, body.priority)
        num_top = body.top_logprobs or 0
        answer = ChatAnswer(request_id, server.model_name, num_top, server.fingerprint)
        return await server.answer(request, generation, answer, body)


def _add_tokens(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest) -> protocol.TokenizeResponse:
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        tokenizer = server.client.tokenizer
        if body.messages is not None:
            messages = plain_messages(body.messages)
            tokens = await asyncio.to_thread(
                tokenizer.encode_chat, messages, add_generation_prompt=body.add_generation_prompt
            )
        else:
            assert body.prompt is not None
            tokens = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens)
        limit = server.client.config.scheduler.max_model_len
        return protocol.TokenizeResponse(count=len(tokens), max_model_len=limit, tokens=tokens)

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest) -> protocol.DetokenizeResponse:
        server.check_model(body.model)
        decode = server.client.tokenizer.decode
        text = await asyncio.to_thread(decode, body.tokens, body.skip_special_tokens)
        return protocol.DetokenizeResponse(prompt=text)


def _add_status(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    async def models() -> protocol.ModelList:
        return protocol.ModelList(data=[server.card()])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> protocol.ModelCard:
        server.check_model(name)
        return server.card()

    @app.get("/health")
    async def health() -> protocol.Health:
        if (failure := server.failure) is not None:
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
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)
