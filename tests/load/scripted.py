"""A small server in a thread of the test: streams of words at once, or a scripted response."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.load.wire import DONE, LAST_CHUNK, ROLE, STREAM_HEAD, chat, chunk, event, plain, usage

# From the body of a request to the bytes of its answer; None hangs until the server is stopped.
Answer = Callable[[dict[str, Any]], bytes | None]


def answer_words(body: dict[str, Any]) -> bytes:
    """As many tokens as are asked for, and usage if that is."""
    count = body["max_tokens"]
    if "messages" in body:
        parts = [chat(ROLE), *(chat(" a") for _ in range(count)), chat({}, "length")]
        length = sum(len(str(message["content"]).split()) for message in body["messages"])
    else:
        parts = [{"choices": [{"text": " a", "finish_reason": None}]} for _ in range(count - 1)]
        parts.append({"choices": [{"text": " a", "finish_reason": "length"}]})
        length = len(body["prompt"].split() if isinstance(body["prompt"], str) else body["prompt"])
    if body.get("stream_options"):
        parts.append(usage(length, count))
    return STREAM_HEAD + b"".join(chunk(event(part)) for part in parts) + chunk(DONE) + LAST_CHUNK


class ScriptedServer:
    def __init__(self, answer: Answer, key: str | None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.stopped = threading.Event()
        self.answer, self.key = answer, key
        self._http = _Listener(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Listener(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True
    owner: ScriptedServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        owner = self._owner()
        if owner.key is not None and self.headers["Authorization"] != f"Bearer {owner.key}":
            self.wfile.write(plain("401 Unauthorized", b'{"error": {"message": "no key"}}'))
        elif self.path == "/v1/models":
            self.wfile.write(plain("200 OK", b'{"data": [{"id": "org/Tiny-Model"}]}'))
        else:
            self.wfile.write(plain("404 Not Found", b'{"detail": "Not Found"}'))

    def do_POST(self) -> None:
        owner = self._owner()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        owner.bodies.append(body | {"path": self.path, "key": self.headers["Authorization"]})
        answer = owner.answer(body)
        if answer is None:
            owner.stopped.wait()
            self.close_connection = True
        else:
            self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _owner(self) -> ScriptedServer:
        assert isinstance(self.server, _Listener)
        return self.server.owner


@contextmanager
def scripted_server(answer: Answer = answer_words, key: str | None = None) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answer, key)
    try:
        yield server
    finally:
        server.stop()


def slowly(answer: Answer, delay_s: float) -> Answer:
    def wait(body: dict[str, Any]) -> bytes | None:
        time.sleep(delay_s)
        return answer(body)

    return wait
