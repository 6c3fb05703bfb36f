"""A warning that every response carries, refusals included: nobody is to take its content for what it is not."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

WARNING_HEADER = "X-Slipstream-Warning"


class WarningHeader:
    def __init__(self, app: ASGIApp, text: str) -> None:
        self._app = app
        self._text = text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[WARNING_HEADER] = self._text
            await send(message)

        await self._app(scope, receive, marked)
