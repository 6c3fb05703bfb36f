"""Errors as clients of the OpenAI API expect them: a status, and a JSON object that says what to do."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from slipstream.errors import EngineError, RequestError, nearest
from slipstream.server.protocol import REQUEST_FIELDS


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param)


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": _clean(message), "type": kind, "param": param and _clean(param), "code": status}}


def _clean(text: str) -> str:
    """What a client sent and an error repeats may hold half characters, which no answer can carry."""
    return text.encode("utf-8", "replace").decode()


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error from the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return ApiError(503, str(error), headers={"Retry-After": "5"})
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    return ApiError(500, f"{type(error).__name__}: {error}")


def install_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(EngineError)
    @app.exception_handler(RequestError)
    async def on_engine_error(_request: Request, error: Exception) -> JSONResponse:
        known = as_api_error(error)
        return JSONResponse(known.body, known.status, known.headers)

    @app.exception_handler(Exception)
    async def on_bug(_request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(as_api_error(error).body, 500)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = _explain(error.errors()[0])
        return JSONResponse(error_body(400, message, param), 400)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        reason = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
        message = reason.get(error.status_code, str(error.detail))
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)


def _explain(problem: dict[str, Any]) -> tuple[str, str | None]:
    """One line for the first problem of a body, and the name of the field."""
    if problem["type"] == "json_invalid":
        return "the body is not valid JSON", None
    path = [str(part) for part in problem["loc"] if part != "body"]
    name = path[0] if path else None
    if name is None:
        return f"the body must be a JSON object: {problem['msg']}", None
    if problem["type"] == "extra_forbidden":
        field = ".".join(path)
        return f"unknown field '{field}'{nearest(path[-1], REQUEST_FIELDS)}", field
    return f"{'.'.join(path)}: {problem['msg']}", name
