"""EAGLE and EAGLE-3 on the GPU under the guard: the tokens of the CPU, in every graph mode, at every k."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config import GRAPH_MODES

heads = pytest.importorskip("tests.gpu.written_heads", reason="transformers writes the tiny models")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "1")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = heads.write_target(tmp_path_factory.mktemp("target"))
    return folder


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = heads.tokens_of_the_cpu(target)
    return found


@pytest.mark.parametrize(
    ("mode", "k", "verify"),
    [*((mode, 3, "match") for mode in GRAPH_MODES), ("full", 1, "match"), ("full", 7, "match")],
)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_the_same_tokens_with_and_without_a_head(
    target: Path, expected: dict[str, list[int]], tmp_path: Path, method: str, mode: str, k: int, verify: str
) -> None:
    tiny = heads.tiny_heads
    case = tiny.eagle(heads.LONG) if method == "eagle" else tiny.eagle3(body=heads.LONG)
    folder = case.write(tmp_path)
    given = {"method": method, "model": str(folder), "num_speculative_tokens": k, "verify": verify}
    heads.check(target, expected, lambda: given, cudagraph_mode=mode, steps_in_flight=2)
