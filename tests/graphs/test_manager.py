from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from slipstream.device.cpu import CpuDevice
from slipstream.device.sim import SimDevice
from slipstream.graphs import manager as manager_module
from slipstream.graphs.descriptor import AttentionState, BatchExecutionDescriptor, GraphKind
from slipstream.graphs.manager import CudaGraphManager, Forward
from slipstream.graphs.mode import CUDAGraphMode

M = CUDAGraphMode
BOTH_TIERS = [GraphKind(length, tier) for length in (1, None) for tier in ("fast", "full")]


def make(mode: M, sizes: tuple[int, ...] = (1, 2, 4, 8, 16), max_num_reqs: int = 6) -> CudaGraphManager:
    return CudaGraphManager(CpuDevice(), mode, sizes, max_num_reqs)


def test_decodes_take_the_smallest_graph_they_fit_into() -> None:
    manager = make(M.FULL_DECODE_ONLY)
    for num_reqs, padded in ((1, 1), (2, 2), (3, 4), (4, 4)):
        desc = manager.dispatch(num_reqs, num_reqs, query_len=1)
        assert (desc.mode, desc.num_tokens, desc.num_reqs, desc.query_len) == (M.FULL, padded, padded, 1)
    # Eight requests are more than there are rows, so there is no such graph.
    assert manager.dispatch(5, 5, query_len=1).mode is M.NONE


def test_mixed_batches_take_their_own_graphs_or_none() -> None:
    assert make(M.FULL_DECODE_ONLY).dispatch(2, 7, query_len=None).mode is M.NONE
    desc = make(M.FULL).dispatch(2, 7, query_len=None)
    assert (desc.mode, desc.num_tokens, desc.num_reqs, desc.query_len) == (M.FULL, 8, 6, None)
    assert make(M.FULL_AND_PIECEWISE).dispatch(2, 7, query_len=None).mode is M.PIECEWISE
    assert make(M.FULL).dispatch(2, 17, query_len=None).mode is M.NONE
    # A graph with enough tokens and too few requests does not fit.
    assert make(M.FULL).dispatch(5, 4, query_len=None).num_reqs >= 5


def test_large_sizes_are_for_decodes_or_for_mixed_batches() -> None:
    manager = make(M.FULL, sizes=(512, 544, 640, 1024), max_num_reqs=640)
    assert manager.dispatch(600, 600, query_len=1).num_tokens == 640
    assert manager.dispatch(500, 513, query_len=None) == BatchExecutionDescriptor(M.FULL, 1024, 640)


def test_a_batch_without_a_graph_keeps_its_size() -> None:
    desc = make(M.NONE).dispatch(3, 9, query_len=None)
    assert desc == BatchExecutionDescriptor(M.NONE, num_tokens=9, num_reqs=3)


def test_decodes_without_a_graph_of_their_own_use_a_mixed_one() -> None:
    manager = CudaGraphManager(CpuDevice(), M.FULL, sizes=(8,), max_num_reqs=6)
    assert manager.dispatch(3, 3, query_len=1) == BatchExecutionDescriptor(M.FULL, 8, 6)


@pytest.mark.parametrize("query_len", [1, None])
def test_attention_that_no_graph_may_hold_runs_in_pieces_or_without_a_graph(query_len: int | None) -> None:
    for mode, expected in ((M.FULL, M.NONE), (M.FULL_DECODE_ONLY, M.NONE), (M.FULL_AND_PIECEWISE, M.PIECEWISE)):
        manager = make(mode)
        assert manager.dispatch(3, 3, query_len, attention_inside=False).mode is expected
        if query_len is not None:
            assert manager.dispatch(3, 3, query_len).mode is M.FULL


@pytest.mark.parametrize("query_len", [1, 3])
def test_uniform_batches_pad_requests_and_tokens_together(query_len: int) -> None:
    manager = CudaGraphManager(CpuDevice(), M.FULL_DECODE_ONLY, (1, 3, 6, 8, 12), 8, [GraphKind(query_len)])
    assert [desc.num_reqs for desc in manager.descriptors] == [1, 3, 6, 8]
    for desc in manager.descriptors:
        assert desc.num_tokens == desc.num_reqs * query_len


def test_every_descriptor_is_warmed_up_and_then_recorded_with_a_state_of_its_own() -> None:
    device = SimDevice(1)
    manager = CudaGraphManager(device, M.FULL, (2, 4), 4, BOTH_TIERS)
    x = torch.ones(4, device=device.torch_device)
    calls: list[tuple[int, bool]] = []
    outputs: dict[BatchExecutionDescriptor, Tensor] = {}

    def create_forward(desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        calls.append((desc.num_tokens, warmup))

        def run() -> None:
            outputs[desc] = x[: desc.num_tokens] + 1

        return Forward(run, AttentionState(desc))

    states = manager.capture(create_forward, "recording")
    assert calls == [(4, True), (4, False)] * 4 + [(2, True), (2, False)] * 4, "largest first"
    assert set(states) == set(manager.descriptors)
    assert all(pair.warmup is not pair.captured for pair in states.values())
    for desc in manager.descriptors:
        manager.replay(desc)
        assert device.peek(outputs[desc]).tolist() == [2.0] * desc.num_tokens
    x.fill_(5)
    manager.replay(manager.descriptors[0])
    assert device.peek(outputs[manager.descriptors[0]]).tolist() == [6.0] * 2, "recorded memory, new values"


def test_waiting_is_allowed_while_graphs_are_made_and_not_after() -> None:
    device = SimDevice(1)
    assert device.sync_guard.forbidden
    manager = CudaGraphManager(device, M.FULL, (2,), max_num_reqs=2)
    seen: list[bool] = []

    def create_forward(desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        return Forward(lambda: seen.append(device.sync_guard.forbidden), AttentionState(desc))

    manager.capture(create_forward, "recording")
    assert seen == [False] * len(seen)
    assert device.sync_guard.forbidden


def test_what_is_not_urgent_is_recorded_later_and_used_only_then() -> None:
    device = SimDevice(1)
    manager = CudaGraphManager(device, M.FULL, (2, 4, 8), 8, order=lambda desc: desc.num_tokens != 8)
    x = torch.ones(8, device=device.torch_device)

    def create(desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        return Forward(lambda: x[: desc.num_tokens].mul_(2), AttentionState(desc))

    manager.capture(create, "recording")
    assert manager.dispatch(2, 2, query_len=1).num_tokens == 8
    assert manager.capture_one_more(create)  # the largest that is missing comes first
    assert manager.dispatch(3, 3, query_len=1).num_tokens == 4
    assert manager.dispatch(2, 3, query_len=None).num_tokens == 8
    while manager.capture_one_more(create):
        pass
    desc = manager.dispatch(2, 2, query_len=1)
    assert desc.num_tokens == 2
    manager.replay(desc)


def test_mixed_batches_are_recorded_up_to_512_tokens() -> None:
    manager = make(M.FULL, sizes=(512, 544), max_num_reqs=544)
    assert manager.dispatch(2, 500, query_len=None).mode is M.FULL
    assert manager.dispatch(2, 520, query_len=None).mode is M.NONE
    assert manager.dispatch(520, 520, query_len=1).mode is M.FULL


def test_kernels_are_compiled_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Urgent ones all at once, those for idle time as many as are compiled at a time."""
    device, calls = SimDevice(1), list[str]()

    @contextmanager
    def compile_ahead() -> Iterator[None]:
        calls.append("compile")
        yield
        calls.append("compiled")

    monkeypatch.setattr(manager_module, "compiles_ahead", lambda _device: True)
    monkeypatch.setattr(manager_module, "num_compilers", lambda: 2)
    monkeypatch.setattr(manager_module, "compile_ahead", compile_ahead)
    sizes = (1, 2, 4, 8, 16)
    manager = CudaGraphManager(device, M.FULL_DECODE_ONLY, sizes, 16, order=lambda desc: desc.num_tokens < 8)

    def create(desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        return Forward(lambda: calls.append(f"{desc.num_tokens}{'' if warmup else '!'}"), AttentionState(desc))

    manager.capture(create, "recording")
    assert calls == ["compile", "16", "8", "compiled", "16", "16!", "8", "8!"]
    calls.clear()
    while manager.capture_one_more(create):
        pass
    first = ["compile", "4", "2", "compiled", "4", "4!", "2", "2!"]
    assert calls == [*first, "compile", "1", "compiled", "1", "1!"]
