"""Faults of real engines, planted in the drafter's own code: each is found, and without it the worlds are right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig
from slipstream.device.sim import CaptureError, SimDevice, SimError
from slipstream.device.sync_guard import HostSyncError
from slipstream.graphs.descriptor import AttentionStatePair
from slipstream.graphs.manager import CudaGraphManager
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.speculate import draft_inputs
from slipstream.speculate.autoregressive import AutoRegressiveSpeculator
from tests.sim.hash_model import HashBackend
from tests.sim.world import World

# Nothing samples inside a graph here, so that the drafter runs in graphs of its own.
EVENTS = frozenset({"drafts", "graphs", "logprobs", "noise", "stop_ids", "late_arrivals"})
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "steps_in_flight": 2,
    "cudagraph_mode": "full",
    "cudagraph_capture_sizes": (2, 4, 8, 16, 48),
    "speculative_config": {"method": "eagle3", "model": "the hash", "num_speculative_tokens": 3},
}
SEEDS = range(1, 3)


def worlds(**options: Any) -> list[Exception | None]:
    found: list[Exception | None] = []
    for seed in SEEDS:
        backend = {"make_backend": options["make_backend"]} if "make_backend" in options else {}
        settings = {**SETTINGS, **{key: value for key, value in options.items() if key != "make_backend"}}
        try:
            World(seed, settings, EVENTS, **backend).run()
        except (SimError, HostSyncError, AssertionError) as error:
            found.append(error)
        else:
            found.append(None)
    return found


def assert_found(found: list[Exception | None]) -> None:
    assert all(found), found


def assert_right(found: list[Exception | None]) -> None:
    assert found == [None] * len(SEEDS)


# --- a drafter's recording with the state of a warm-up ----------------------------------------------


@dataclass
class LazyMetadata:
    common: CommonAttentionMetadata
    schedule: Tensor | None = None


class LazyBackend(HashBackend):
    """Makes a schedule when first run with a state, in the manner of FlashMLA, and cannot do without."""

    def __init__(self, device: SimDevice) -> None:
        self._place = device.torch_device

    def build(self, common: CommonAttentionMetadata) -> Any:
        return LazyMetadata(common)

    def starting_at(self, metadata: Any, seq_starts: Tensor) -> Any:
        return replace(metadata, common=replace(metadata.common, seq_starts=seq_starts))

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        if metadata.schedule is None:
            metadata.schedule = torch.ones(1, dtype=torch.float64, device=self._place)
        return super().run(layer, q * metadata.schedule, kv_cache, metadata.common)


def lazy(_config: EngineConfig, device: SimDevice) -> LazyBackend:
    return LazyBackend(device)


def test_a_drafters_recording_takes_the_state_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(worlds(make_backend=lazy))
    right = CudaGraphManager.capture_one

    def faulty(self: CudaGraphManager, *arguments: Any) -> AttentionStatePair:
        right(self, *arguments)
        for desc, pair in self.states.items():
            self.states[desc] = AttentionStatePair(pair.warmup, pair.warmup)
        return pair

    monkeypatch.setattr(CudaGraphManager, "capture_one", faulty)
    found = worlds(make_backend=lazy)
    assert all(isinstance(error, CaptureError) for error in found), found


# --- drafts decoded in pieces; indices that are not padded -------------------------------------------


def test_the_last_tokens_of_a_first_pass_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(worlds())
    right = draft_inputs.prepare_shifted_pass.body

    def faulty(**arguments: Any) -> None:
        real = int((arguments["query_start_loc"].diff() > 0).sum())
        before = arguments["last_indices"].clone()
        right(**arguments)
        arguments["last_indices"][real:] = before[real:]

    monkeypatch.setattr(draft_inputs.prepare_shifted_pass, "body", faulty)
    assert_found(worlds(cudagraph_capture_sizes=(4, 16, 48)))


def test_drafts_are_never_decoded_in_pieces() -> None:
    for mode in CUDAGraphMode:
        assert mode.for_draft_decodes() in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)


# --- a bound that forgets drafts, or copies them from the device -------------------------------------


def test_a_bound_that_forgets_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(worlds(cudagraph_mode="none"))
    right = AutoRegressiveSpeculator.context

    def faulty(
        self: Any, batch: Any, num_tokens: int, starts: Any, starts_cpu: Any, query_len: int, bounds: Any
    ) -> Any:
        return right(self, batch, num_tokens, starts, starts_cpu, query_len, bounds - 3 * self.num_drafts)

    monkeypatch.setattr(AutoRegressiveSpeculator, "context", faulty)
    assert_found(worlds(cudagraph_mode="none"))


def test_a_bound_that_is_copied_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    right = AutoRegressiveSpeculator.context

    def faulty(
        self: Any, batch: Any, num_tokens: int, starts: Any, starts_cpu: Any, query_len: int, bounds: Any
    ) -> Any:
        exact = self._seq_lens[: batch.num_reqs].cpu().numpy()
        return right(self, batch, num_tokens, starts, starts_cpu, query_len, exact)

    monkeypatch.setattr(AutoRegressiveSpeculator, "context", faulty)
    found = worlds(cudagraph_mode="none")
    assert all(isinstance(error, HostSyncError) for error in found), found
