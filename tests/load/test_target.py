from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from slipstream.errors import ConfigError
from slipstream.load.target import Target
from tests.load.scripted import ScriptedServer, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(key="sesame") as running:
        yield running


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("", "POST /v1/chat/completions HTTP/1.1"),
        ("/", "POST /v1/chat/completions HTTP/1.1"),
        ("/v1", "POST /v1/chat/completions HTTP/1.1"),
        ("/v1/", "POST /v1/chat/completions HTTP/1.1"),
        ("/openai", "POST /openai/v1/chat/completions HTTP/1.1"),
    ],
)
def test_path_of_requests(server: ScriptedServer, path: str, line: str) -> None:
    target = Target.parse(server.url + path)
    assert target.head("chat").decode().splitlines()[0] == line
    assert target.head("completions").decode().splitlines()[0] == line.replace("/chat", "")
    assert f"Host: {server.url.removeprefix('http://')}" in target.head("chat").decode().splitlines()
    assert b"Authorization" not in target.head("chat")


def test_localhost_is_tried_under_every_address(server: ScriptedServer) -> None:
    target = Target.parse(server.url.replace("127.0.0.1", "localhost"))
    assert target.address[0] == "127.0.0.1"
    assert target.is_local


def test_first_model_is_asked_for_with_the_key(server: ScriptedServer) -> None:
    assert Target.parse(server.url, "sesame").first_model() == "org/Tiny-Model"
    with pytest.raises(ConfigError, match=r"lists no models \(HTTP 401: no key\); name one with --model"):
        Target.parse(server.url).first_model()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{\"data\": []}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nno!",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"",
    ],
)  # fmt: skip
def test_servers_that_list_no_models(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target.parse(f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.accept()[0].close()  # the look whether anything listens

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConfigError, match="name one with --model") as caught:
            target.first_model()
        thread.join()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://127.0.0.1:8000", "https is not supported; use the server's own port or a local proxy"),
        ("127.0.0.1:8000", "--url must be such as http://127.0.0.1:8000, not '127.0.0.1:8000'"),
        ("ftp://x", "--url must be such as http://127.0.0.1:8000"),
        ("http://", "--url must be such as http://127.0.0.1:8000"),
        ("http://x:port", "--url http://x:port is no address"),
        ("http://127.0.0.1:1/a b", "the path must be printable ASCII characters"),
        ("http://127.0.0.1:1", "no server answers at http://127.0.0.1:1 (Connection refused); start one with"),
    ],
)
def test_bad_addresses(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Target.parse(url)
    assert message in str(caught.value)


def test_a_key_cannot_bring_fields_with_it() -> None:
    with pytest.raises(ConfigError, match="--api-key must be printable ASCII"):
        Target.parse("http://127.0.0.1:1", "x\r\nHost: y")


def test_other_machines_are_not_local() -> None:
    assert not Target(socket.AF_INET, ("10.0.0.7", 80), "x", "/v1").is_local
    assert Target(socket.AF_INET6, ("::1", 80, 0, 0), "x", "/v1").is_local
