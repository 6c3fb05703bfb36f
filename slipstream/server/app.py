"""The routes. Each checks its body, asks the engine, and answers in the words of the API."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from slipstream import __version__
from slipstream.engine.client import EngineClient
from slipstream.engine.process import EngineProcess
from slipstream.server import protocol
from slipstream.server.answers import Answer, ChatAnswer, CompletionAnswer
from slipstream.server.errors import ApiError, as_api_error, install_handlers
from slipstream.server.generation import ClientGone, Gate, Generation, collect
from slipstream.server.limits import Limits
from slipstream.server.metrics import CONTENT_TYPE, ServerMetrics
from slipstream.server.params import chat_params, completion_params, plain_messages, prompts_of
from slipstream.server.settings import ServerSettings

logger = logging.getLogger("slipstream.server")

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": protocol.ErrorResponse, "description": "The request cannot be served; the message says why."},
    "503": {"model": protocol.ErrorResponse, "description": "The engine is being restarted."},
}
# Of one event: its data is a chunk in JSON, an error in JSON, or [DONE].
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_SSE = {"text/event-stream": {"schema": _EVENT}}
_NO_CLIENT = Response(status_code=499)


class Server:
    """One engine behind HTTP."""

    def __init__(self, client: EngineClient, model_name: str, settings: ServerSettings) -> None:
        self.client = client
        self.model_name = settings.served_model_name or model_name
        self.settings = settings
        self.started = int(time.time())
        running = client.running
        self.metrics = ServerMetrics(lambda: client.stats, lambda: getattr(running, "num_restarts", 0))
        self.gate = Gate(client, self.metrics, settings.max_queue)
        self._ids = itertools.count()

    @property
    def is_ready(self) -> bool:
        running = self.client.running
        return running.is_ready if isinstance(running, EngineProcess) else True

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
        log = _RequestLog(self, request, answer, generation)
        if not body.stream:
            try:
                await collect(self.gate, generation, request)
            except ClientGone:
                log.write(499)
                return _NO_CLIENT
            except Exception as error:
                log.write(as_api_error(error).status)
                raise
            log.write(200)
            return JSONResponse(answer.whole(generation).model_dump())
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        events = self._events(generation, answer, body.n, include_usage, log)
        # The first event decides the status: what fails before it is an ordinary error.
        first = await anext(events)
        return StreamingResponse(_chain(first, events), media_type="text/event-stream")

    async def _events(
        self,
        generation: Generation,
        answer: CompletionAnswer | ChatAnswer,
        n: int,
        include_usage: bool,
        log: _RequestLog,
    ) -> AsyncIterator[bytes]:
        status = 499
        try:
            async with self.gate.run(generation, every_token=True) as outputs:
                if isinstance(answer, ChatAnswer):
                    yield _event(answer.first(n))
                async for i, output in outputs:
                    for chunk in answer.chunks(i, output):
                        yield _event(chunk)
            if include_usage:
                yield _event(answer.last(generation))
            yield b"data: [DONE]\n\n"
            status = 200
        except Exception as error:
            known = as_api_error(error)
            status = known.status
            yield f"data: {json.dumps(known.body)}\n\n".encode()
        finally:
            log.write(status)


class _RequestLog:
    """One line a request, when it is over."""

    def __init__(self, server: Server, request: Request, answer: Answer, generation: Generation) -> None:
        self._server = server
        self._request = request
        self._answer = answer
        self._generation = generation
        self._start = time.monotonic()

    def write(self, status: int) -> None:
        generation = self._generation
        path = self._request.url.path
        self._server.metrics.requests.labels(path, str(status)).inc()
        if not self._server.settings.log_requests:
            return
        firsts = [o.timings.first_token_s for o in generation.latest.values() if o.timings.first_token_s is not None]
        ends = [choice.finish_reason for output in generation.latest.values() for choice in output.outputs]
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": self._answer.request_id,
            "path": path,
            "status": status,
            "prompt_tokens": generation.num_prompt_tokens,
            "cached_tokens": generation.num_cached_tokens,
            "output_tokens": generation.num_output_tokens,
            "first_token_ms": round(1000 * min(firsts), 1) if firsts else None,
            "total_ms": round(1000 * (time.monotonic() - self._start), 1),
            "finish": ends,
        }
        sys.stderr.write(json.dumps(line) + "\n")


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_none=True).encode() + b"\n\n"


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(rest):  # type: ignore[type-var]
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
        answer = CompletionAnswer(request_id, server.model_name)
        return await server.answer(request, generation, answer, body)

    @app.post("/v1/chat/completions", response_model=protocol.ChatCompletionResponse, responses=streamed)  # type: ignore[arg-type]
    async def chat_completions(body: protocol.ChatCompletionRequest, request: Request) -> Response:
        server.check_model(body.model)
        params = chat_params(body)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        prompt = server.client.tokenizer.encode_chat(
            plain_messages(body.messages),
            tools=None if body.tool_choice == "none" else tools,
            variables=body.chat_template_kwargs,
        )
        request_id = server.new_id("chatcmpl")
        generation = await server.gate.prepare([prompt], params, request_id, body.priority)
        answer = ChatAnswer(request_id, server.model_name, num_top=body.top_logprobs or 0)
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
            tokens = tokenizer.encode_chat(messages, add_generation_prompt=body.add_generation_prompt)
        else:
            assert body.prompt is not None
            tokens = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        limit = server.client.config.scheduler.max_model_len
        return protocol.TokenizeResponse(count=len(tokens), max_model_len=limit, tokens=tokens)

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest) -> protocol.DetokenizeResponse:
        server.check_model(body.model)
        text = server.client.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
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
        if not server.is_ready:
            raise ApiError(503, "the engine is being restarted", headers={"Retry-After": "5"})
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
