"""JSON bodies, parsed strictly: what is not JSON is refused in one line, before any field is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from slipstream.server.errors import ApiError, explain_invalid_body

Model = TypeVar("Model", bound=BaseModel)

_JSON = b"application/json"


def read_json(body: bytes) -> Any:
    """Python's parser accepts NaN and Infinity and reads 1e999 as infinity; JSON has none of these."""
    try:
        return _DECODER.decode(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("it is not UTF-8", "", error.start) from error
    except RecursionError as error:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from error
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise
        raise json.JSONDecodeError("it holds a number of too many digits", "", 0) from error


def read_body(body: bytes, content_type: bytes | None, has_origin: bool, model: type[Model]) -> Model:
    """The parsed body of a route that generates; raises an ``ApiError`` of one line if it is invalid."""
    check_content_type(content_type, has_origin)
    try:
        return model.model_validate(read_json(body))
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error.msg}") from error
    except ValidationError as error:
        message, param = explain_invalid_body(error.errors(include_url=False), model)
        raise ApiError(400, message, param=param) from error


class JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            if self.body_field is not None:
                given = request.headers.get("content-type")
                check_content_type(None if given is None else given.encode(), "origin" in request.headers)
                if not given:
                    others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
                    request.scope["headers"] = [*others, (b"content-type", _JSON)]
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def check_content_type(content_type: bytes | None, has_origin: bool) -> None:
    """A body without a type is taken for JSON, except from a browser's page, which could send one across origins."""
    if not content_type and not has_origin:
        return
    essence = (content_type or b"").partition(b";")[0].strip().lower()
    if not (essence == _JSON or (essence.startswith(b"application/") and essence.endswith(b"+json"))):
        sent = f"'{essence.decode('latin-1')}'" if essence else "no type"
        raise ApiError(415, f"the body must be JSON: send the header 'Content-Type: application/json', not {sent}")


def _refuse(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is not a JSON number", "", 0)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise json.JSONDecodeError(f"{digits[:20]} is too large a number", "", 0)
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
