"""Errors in the format of the OpenAI API: a status, and a JSON object whose message says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from slipstream.errors import EngineError, RequestError, nearest
from slipstream.parameters import extra_parameters

Location = tuple[Any, ...]  # names of fields and indices of lists

_SHOULD_BE = "Input should be "


class ApiError(Exception):
    """A response other than success."""

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
    """Text repeated from a client may hold lone surrogates, which cannot be encoded in a response."""
    return text.encode("utf-8", "replace").decode()


def as_api_error(error: BaseException) -> ApiError:
    """The response for an error from the engine."""
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
    async def on_fault(_request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(as_api_error(error).body, 500)  # starlette raises it again, so that it is logged

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        body_field = getattr(request.scope.get("route"), "body_field", None)
        message, param = explain_invalid_body(error.errors(), body_field and body_field.field_info.annotation)
        return JSONResponse(error_body(400, message, param), 400)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        reason = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
        message = reason.get(error.status_code, str(error.detail))
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)


def explain_invalid_body(problems: Sequence[Any], body: Any) -> tuple[str, str | None]:
    """One line for the first problem of a body, and the name of the field. ``body``: the type it was parsed as."""
    problem = problems[0]
    if problem["type"] == "json_invalid":
        return f"the body is not valid JSON: {problem['ctx']['error']}", None
    locations = [tuple(part for part in problem["loc"] if part != "body") for problem in problems]
    if (at := _kind_in(locations[0], body)) is not None:
        return _explain_kinds(problems, locations, at)
    path = [str(part) for part in locations[0]]
    name = path[0] if path else None
    if name is None:
        return f"the body must be a JSON object: {problem['msg']}", None
    if problem["type"] == "extra_forbidden":
        field = ".".join(path)
        known = (*_fields_at(body, path[:-1]), *(extra_parameters() if len(path) == 1 else ()))
        return f"unknown field '{field}'{nearest(path[-1], known)}", field
    return f"{'.'.join(path)}: {_message_of(problem)}", name


def _kind_in(location: Location, body: Any) -> int | None:
    """The index after the name of a type tried for a field with several types; None if there is no such name."""
    models = list(_models_in(body))
    for at, part in enumerate(location):
        inner = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        if any(_has_kinds(annotation) for annotation in inner):
            return at + 1 if at + 1 < len(location) else None
        models = [model for annotation in inner for model in _models_in(annotation)] if inner else models
    return None


def _has_kinds(annotation: Any) -> bool:
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    return get_origin(annotation) in (Union, UnionType) and len(kinds) > 1


def _explain_kinds(problems: Sequence[Any], locations: Sequence[Location], at: int) -> tuple[str, str]:
    """For a value that fits none of its types: the problem of the type that fits furthest."""
    found = [
        (location[:at] + location[at + 1 :], problem)
        for location, problem in zip(locations, problems, strict=True)
        if location[:at] == locations[0][:at]
    ]
    furthest = max(
        (location for location, _ in found), key=lambda location: [(isinstance(part, str), part) for part in location]
    )
    there = [problem for location, problem in found if location == furthest]
    # The right type with a wrong value says more than a wrong type.
    telling = [problem for problem in there if not problem["type"].endswith("_type")] or there
    messages = list(dict.fromkeys(_message_of(problem) for problem in telling))
    first, *others = messages if len(telling) == len(there) else messages[:1]
    message = " or ".join((first, *(other.removeprefix(_SHOULD_BE) for other in others)))
    return f"{'.'.join(map(str, furthest))}: {message}", str(furthest[0])


def _message_of(problem: Any) -> str:
    """In the words of JSON."""
    if problem["type"] in ("model_type", "dict_type"):
        return f"{_SHOULD_BE}an object"
    if problem["type"] == "too_short" and problem["ctx"]["min_length"] == 1:
        return "it must not be empty"
    return str(problem["msg"]).replace(" after validation", "")


def _fields_at(body: Any, path: Sequence[str]) -> list[str]:
    """The names of the object's fields at ``path``. Components of the path that are list indices are skipped."""
    models = list(_models_in(body))
    for part in path:
        inner = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [model for annotation in inner for model in _models_in(annotation)] if inner else models
    return [name for model in models for name in model.model_fields]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
