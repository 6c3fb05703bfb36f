"""Passes in pieces around attention: the tokens of launches one by one, on mixed batches; drafts are decoded in none.

A real network on the simulated device. Every size has its graph before the first request comes, the drafter's too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.context import AttentionContext
from slipstream.device.sim import DeviceFaultError
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.graphs.piecewise import PiecewiseForward
from slipstream.speculate.autoregressive import AutoRegressiveSpeculator
from slipstream.speculate.draft_graphs import DraftGraphs
from slipstream.speculate.eagle import EagleSpeculator
from slipstream.speculate.speculator import DraftBatch
from tests.sim.tiny_engines import METHODS, Folders, K, Watched, arrivals, expected, run, watch, write

M = CUDAGraphMode
REQUESTS = arrivals(5)
# What the target's passes with and without prompts run in.
MODES = {
    "none": (M.NONE, M.NONE),
    "piecewise": (M.PIECEWISE, M.PIECEWISE),
    "full_and_piecewise": (M.PIECEWISE, M.FULL),
}
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Tokens:
    return expected(folders, REQUESTS)


def graphs_of(watched: Watched) -> DraftGraphs:
    speculator = watched.engine.core.runner.speculator
    assert isinstance(speculator, EagleSpeculator) and speculator._graphs is not None
    return speculator._graphs


def check_modes(watched: Watched, with_prompts: M, without: M) -> None:
    """Every batch ran as it should, and as many passes were really replayed."""
    assert watched.num_mixed >= 4
    assert set(watched.modes(with_prompts=True)) == {with_prompts}
    decodes = watched.modes(with_prompts=False)
    assert decodes[without] > 0.8 * decodes.total(), "a prompt with as many tokens as a decode may look like one"
    in_pieces = watched.modes(with_prompts=True) + decodes
    assert watched.num_target_replays == in_pieces[M.PIECEWISE]


@pytest.mark.parametrize(
    ("mode", "method"),
    [
        ("none", "eagle3"),
        *(("piecewise", method) for method in METHODS),
        *(("full_and_piecewise", method) for method in ("none", "eagle3")),
    ],
)
def test_pieces_are_eager(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens, mode: str, method: str
) -> None:
    decoded: list[int] = []
    finish = AutoRegressiveSpeculator.finish

    def finish_watched(self: AutoRegressiveSpeculator, batch: DraftBatch, noise: bool) -> Tensor:
        before = len(watched.replays)
        out = finish(self, batch, noise)
        decoded.append(len(watched.replays) - before)
        return out

    watched = watch(monkeypatch, folders, "triton", method, cudagraph_mode=mode)
    monkeypatch.setattr(AutoRegressiveSpeculator, "finish", finish_watched)
    assert run(watched.engine, REQUESTS) == plain
    check_modes(watched, *MODES[mode])
    if method != "eagle3":
        return
    num_drafted = len(watched.replays) - watched.num_target_replays
    assert (num_drafted > 3) is (mode != "none"), "first passes of the drafter run as the target's do"
    assert set(decoded) <= {0} and (decoded or mode == "full_and_piecewise"), "the others are launched, or in one graph"
    if mode != "none":
        assert {desc.mode for desc in graphs_of(watched).rest.states} <= {M.FULL}


@pytest.mark.parametrize(("support", "without"), [("never", M.PIECEWISE), ("decode", M.FULL)])
def test_a_backend_that_cannot_be_recorded_has_pieces(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens, support: str, without: M
) -> None:
    """Full graphs were asked for. (FlashInfer's paths and flex are such backends, in ``test_backends.py``.)"""
    caps = replace(ReferenceBackend.caps, graph_support=support)  # type: ignore[arg-type]
    monkeypatch.setattr(ReferenceBackend, "caps", caps)
    watched = watch(monkeypatch, folders, "reference", "eagle3", cudagraph_mode="full")
    assert run(watched.engine, REQUESTS) == plain
    check_modes(watched, M.PIECEWISE, without)


# --- planted faults -----------------------------------------------------------------------------------


def test_attention_told_of_the_step_before_is_found(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens
) -> None:
    """Pieces with the last step's metadata: its host numbers are another batch's."""
    watched = watch(monkeypatch, folders, "trtllm", "none")
    right, before = PiecewiseForward.replay, [None]

    def stale(self: PiecewiseForward, context: AttentionContext) -> Tensor:
        step: Any = context.group_steps[0]
        before[0], step.shared = step.shared, before[0] or step.shared
        return right(self, context)

    monkeypatch.setattr(PiecewiseForward, "replay", stale)
    with pytest.raises(DeviceFaultError, match="flashinfer_context"):
        assert run(watched.engine, REQUESTS) == plain


def test_drafts_decoded_in_pieces_are_found(monkeypatch: pytest.MonkeyPatch, folders: Folders) -> None:
    """Tokens padded and requests not: attention is given more tokens than there are requests."""
    watched = watch(monkeypatch, folders, "triton", "eagle3", cudagraph_mode="piecewise")
    runner, right = watched.engine.core.runner, EagleSpeculator._next
    speculator, device, size = runner.speculator, runner.device, 4
    assert isinstance(speculator, EagleSpeculator)
    batch = runner.buffers.no_drafting.static(size, size, 1, 96, K)
    pieces = PiecewiseForward(device, runner.graphs.manager.pool)
    with torch.inference_mode(), device.use_stream(device.compute_stream):
        each, bounds = speculator._one_each[: size + 1], batch.seq_lens_bound
        context = speculator.context(batch, size, each, batch.start_loc_cpu, 1, bounds)
        pieces.record(lambda own: right(speculator, 1, K, speculator._input_ids[:size], None, own), context)

    def planted(
        self: EagleSpeculator,
        idx: int,
        num_drafts: int,
        input_ids: Tensor,
        left: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        return pieces.replay(context)[: input_ids.shape[0]]

    monkeypatch.setattr(EagleSpeculator, "_next", planted)
    with pytest.raises(DeviceFaultError, match="decode_attention"):
        run(watched.engine, REQUESTS)


def test_decodes_of_drafts_have_no_descriptor_in_pieces(monkeypatch: pytest.MonkeyPatch, folders: Folders) -> None:
    """Even if the mode were not translated for them; and one that pads tokens alone is refused."""
    monkeypatch.setattr(CUDAGraphMode, "for_draft_decodes", lambda self: self)
    for mode in ("piecewise", "full_and_piecewise"):
        made: Any = graphs_of(watch(monkeypatch, folders, "triton", "eagle3", record_all=False, cudagraph_mode=mode))
        assert M.PIECEWISE in {desc.mode for desc in made.first.descriptors}
        assert M.PIECEWISE not in {desc.mode for desc in made.rest.descriptors}
    with pytest.raises(ValueError, match="8 tokens are not 3 requests of 1"):
        BatchExecutionDescriptor(M.PIECEWISE, num_tokens=8, num_reqs=3, query_len=1)
