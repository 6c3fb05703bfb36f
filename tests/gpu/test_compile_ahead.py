"""Kernels that are compiled before they are needed: many at a time, and none of them runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from slipstream.config import EngineOptions
from slipstream.engine.build import build_shape
from slipstream.graphs.manager import CudaGraphManager
from slipstream.kernels.triton_jit import compile_ahead, compiles_ahead, jit, tl, triton
from slipstream.models import shapes

pytestmark = pytest.mark.gpu


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of kernels as they are compiled, or come from Triton's own cache."""
    names: list[str] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda **event: names.append(event["src"].name)
    yield names
    triton.knobs.compilation.listener = before


@jit
def _fill_kernel(out, value, BLOCK: tl.constexpr):  # noqa: N803
    tl.store(out + tl.arange(0, BLOCK), value)


def test_a_kernel_is_compiled_and_does_not_run(compiled: list[str]) -> None:
    assert compiles_ahead(torch.device("cuda"))
    out = torch.zeros(64, device="cuda")
    with compile_ahead():
        for _ in range(3):
            _fill_kernel[(1,)](out, 7, BLOCK=64)
        _fill_kernel[(1,)](out, 7, BLOCK=32)
        assert torch.empty(1 << 20, device="cuda").count_nonzero() == 0
    assert compiled == ["_fill_kernel"] * 2
    assert out.count_nonzero() == 0
    _fill_kernel[(1,)](out, 7, BLOCK=64)
    assert out.tolist() == [7.0] * 64
    assert len(compiled) == 2


def test_another_thread_goes_on_meanwhile() -> None:
    out = torch.zeros(128, device="cuda")
    with compile_ahead(), ThreadPoolExecutor(1) as other:
        other.submit(lambda: _fill_kernel[(1,)](out, 9, BLOCK=128)).result()
    assert out.tolist() == [9.0] * 128


def test_nothing_is_left_to_compile_when_graphs_are_recorded(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that no other test has, so that their kernels are new to the process."""
    config = {**shapes.SHAPES["smollm2-135m"], "num_hidden_layers": 2, "intermediate_size": 1200, "vocab_size": 4000}
    monkeypatch.setitem(shapes.SHAPES, "own", config)
    late: list[str] = []
    capture = CudaGraphManager.capture_one

    def capture_one(self: CudaGraphManager, *args: Any) -> Any:
        before = len(compiled)
        try:
            return capture(self, *args)
        finally:
            late.extend(compiled[before:])

    monkeypatch.setattr(CudaGraphManager, "capture_one", capture_one)
    options = EngineOptions(device="cuda", dtype="bfloat16", max_num_seqs=16, max_model_len=512, speculate="ngram")
    core = build_shape(options, "own").core
    while core.use_idle_time():
        pass
    assert core.runner.idle_work.num_left == 0
    assert compiled and late == []
