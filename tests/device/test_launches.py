"""Launches that were recorded while they ran, and run again on other values: as if they were launched anew."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.device.cpu import CpuDevice
from slipstream.device.interface import Graph
from slipstream.device.launches import Recorder, recorder, watch
from slipstream.device.operation import operation
from slipstream.kernels import native
from slipstream.kernels.elementwise.rms_norm import rms_norm
from slipstream.sampling.draw import DrawKeys, draw_tokens

needs_c = pytest.mark.skipif(native.library() is None, reason="there is no C compiler here")


@operation(like="x")
def sum_of_lists(x: Tensor) -> Tensor:
    """Reads values, as definitions do."""
    return torch.tensor([float(sum(row)) for row in x.tolist()]).unsqueeze(1).expand(x.shape).clone()


def record(run: Callable[[], object]) -> Graph | None:
    with CpuDevice().record_launches() as capture:
        run()
    return capture.graph


def replay(graph: Graph | None) -> None:
    assert graph is not None
    graph.replay()


def test_operations_of_torch() -> None:
    x, total = torch.rand(4, 3), torch.zeros(4)
    found: list[Tensor] = []

    def run() -> None:
        found[:] = [(x[1:] * 2.0).softmax(1), torch.arange(4) + 1]
        total.add_(x.sum(1))

    graph = record(run)
    first = total.clone()
    x.copy_(torch.rand(4, 3))
    replay(graph)
    assert torch.equal(found[0], (x[1:] * 2.0).softmax(1)) and found[1].tolist() == [1, 2, 3, 4]
    assert torch.equal(total, first + x.sum(1))


@needs_c
def test_a_compiled_kernel_is_called_without_its_operation() -> None:
    x, weight = torch.rand(3, 32), torch.rand(32)
    with torch.inference_mode(), Recorder() as made:
        out = rms_norm(x, weight, 1e-5)
    (launch,) = made.recording.launches
    assert [call[0].__name__ for call in launch.calls] == ["slip_rms_norm"]
    x.copy_(torch.rand(3, 32))
    made.recording.replay()
    assert torch.equal(out, rms_norm(x, weight, 1e-5))


def test_an_operation_that_reads_values_is_called_again() -> None:
    x = torch.rand(2, 3)
    found: list[Tensor] = []
    graph = record(lambda: found.append(sum_of_lists(x)))
    x.copy_(torch.rand(2, 3))
    replay(graph)
    torch.testing.assert_close(found[0], x.sum(1, keepdim=True).expand(2, 3))


@needs_c
def test_another_status_is_seen() -> None:
    """A row with NaN draws from its other logits. The recorded calls alone would draw its first token."""
    logits, rows = torch.rand(2, 50), torch.arange(2, dtype=torch.int32)
    keys = DrawKeys(torch.zeros(2), torch.zeros(2, 2, dtype=torch.int32), rows, rows)
    found: list[Tensor] = []
    graph = record(lambda: found.extend(draw_tokens(logits, rows, keys, False, False)))
    logits.copy_(torch.rand(2, 50))
    replay(graph)
    assert found[0].tolist() == logits.argmax(1).tolist() and found[1].tolist() == [False, False]
    logits[1, 7] = float("nan")
    replay(graph)
    assert found[0].tolist() == logits.nan_to_num(0.0).argmax(1).tolist() and found[1].tolist() == [False, True]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0.5],
        lambda x: x.numpy().sum(),
        lambda x: torch.rand(3),
        lambda x: torch.from_numpy(np.ones(3)),
        lambda x: torch.repeat_interleave(x, torch.arange(3)),
    ],
)
def test_what_the_host_reads_cannot_be_replayed(read: Callable[[Tensor], object]) -> None:
    assert record(lambda: read(torch.rand(3))) is None


@pytest.mark.parametrize(
    ("read", "is_refused"),
    [
        (lambda a: np.minimum(a + 1, 9), False),
        (lambda a: a[1:].copy(), False),
        (lambda a: len(a), False),
        (lambda a: int(a.max()), True),
        (lambda a: a[0], True),
        (lambda a: (a + 1).tolist(), True),
        (lambda a: np.minimum(a, 3)[1:].sum(), True),
        (lambda a: bool((a > 1).any()), True),
        (lambda a: np.concatenate([a, a]), True),
        (lambda a: np.add(a, 1, out=np.zeros(3, dtype=np.int64)), True),
        (lambda a: list(a), True),
    ],
)
def test_numbers_of_the_host_are_watched(read: Callable[[np.ndarray], object], is_refused: bool) -> None:
    lengths = np.array([1, 2, 3])
    expected = read(lengths)
    found: list[object] = []
    graph = record(lambda: found.append(read(watch(lengths))))
    assert (graph is None) == is_refused
    assert np.array_equal(np.asarray(found[0]), np.asarray(expected))


def test_recording_does_not_import_the_compiler() -> None:
    program = (
        "import sys, torch; from slipstream.device.cpu import CpuDevice\n"
        "with torch.inference_mode(), CpuDevice().record_launches(): torch.zeros(3).add_(1)\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_only_the_thread_that_records() -> None:
    x = torch.rand(3, 3)

    def elsewhere() -> None:
        assert recorder() is None
        sum_of_lists(x)

    with Recorder() as made:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not made.recording.launches
    assert recorder() is None
