"""Requests that begin alike: their common pages are read once, from one request's table, and every token is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.graphs.manager import CudaGraphManager
from slipstream.scheduler.request_pages import RequestPages
from slipstream.speculate.eagle import EagleSpeculator
from slipstream.speculate.speculator import DraftBatch
from tests.sim.world import World

EVENTS = frozenset({"graphs", "prefix_caching", "stop_ids", "noise", "aborts"})
SETTINGS: dict[str, Any] = {
    "cascade": "always",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 64,
    "num_gpu_blocks_override": 64,
    "cudagraph_capture_sizes": (2, 4, 8, 16, 48),
    "speculative_config": None,
}


def run(seed: int, **options: Any) -> World:
    drafts = {"drafts"} if options.get("speculative_config") else set()
    world = World(seed, {**SETTINGS, "block_size": 4, **options}, EVENTS | drafts, is_alike=True)
    world.run()
    return world


SPECULATION = {
    "": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "model": "the hash", "num_speculative_tokens": 2},
    "eagle3": {"method": "eagle3", "model": "the hash", "num_speculative_tokens": 3},
}


@pytest.mark.parametrize(
    ("method", "steps_in_flight", "mode", "block_size"),
    [
        ("", 1, "full", 4),
        ("", 4, "none", 1),
        ("", 2, "full_and_piecewise", 4),
        ("ngram", 2, "piecewise", 8),
        ("draft_model", 4, "full_and_piecewise", 2),
        ("eagle3", 2, "full", 4),
        ("eagle3", 4, "full_and_piecewise", 1),
    ],
)
def test_every_token_is_right(method: str, steps_in_flight: int, mode: str, block_size: int) -> None:
    options = {"steps_in_flight": steps_in_flight, "cudagraph_mode": mode, "block_size": block_size}
    assert run(3, speculative_config=SPECULATION[method], **options).num_cascades > 10


# --- planted faults -----------------------------------------------------------------------------------


def test_a_page_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    count = RequestPages.count_common
    monkeypatch.setattr(RequestPages, "count_common", lambda self, *step: count(self, *step) + 1)
    with pytest.raises(Exception, match=r"tokens begin within|expected"):
        run(3, steps_in_flight=2, cudagraph_mode="none")


def test_a_whole_graph_replayed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are right; it reads the common pages once a request."""
    dispatch = CudaGraphManager.dispatch

    def forget(self: CudaGraphManager, *batch: Any, attention_inside: bool = True) -> Any:
        return dispatch(self, *batch[:5])

    monkeypatch.setattr(CudaGraphManager, "dispatch", forget)
    with pytest.raises(AssertionError, match="layers that read common pages once"):
        run(3, steps_in_flight=2, cudagraph_mode="full_and_piecewise")


def test_a_drafter_that_is_told_of_common_pages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys may begin anywhere, and be missing where the target's are."""
    first_context = EagleSpeculator.first_context

    def tell(self: EagleSpeculator, batch: DraftBatch, metadata: Any = None) -> Any:
        attention = replace(batch.step.attention, num_common_pages=int(batch.num_reqs > 1))
        return first_context(self, batch.with_target(batch.step._replace(attention=attention)), metadata)

    monkeypatch.setattr(EagleSpeculator, "first_context", tell)
    with pytest.raises(Exception, match="common pages"):
        run(5, steps_in_flight=2, cudagraph_mode="none", speculative_config=SPECULATION["eagle3"])
