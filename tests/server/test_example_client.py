"""The example of a client, against a running server."""

from __future__ import annotations

import pytest

from tests.server.conftest import MODEL_NAME, RunningServer
from tests.test_examples import run_example


def test_server_client(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("server_client", "--url", server.url, "--max-tokens", 6, patch=monkeypatch)
    assert capsys.readouterr().out.startswith(f"{MODEL_NAME}: ")
