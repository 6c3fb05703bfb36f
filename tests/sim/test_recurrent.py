"""Worlds whose model keeps a state: a wrong rollback is a wrong token. Faults of that kind are planted and found.

The builder of the real engine runs here, and the real pools; only what a layer computes is a hash.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.attention import gdn
from slipstream.attention.gdn import DeltaNetSpec, GDNAttentionMetadata, GDNBackend
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.sim import SimError
from slipstream.device.sync_guard import HostSyncError
from slipstream.engine import resolve
from tests.sim.world import World

# Drafts that are sometimes right, two steps in flight, prompts in chunks beside them.
DRAFTED: dict[str, Any] = {
    "steps_in_flight": 2,
    "cudagraph_mode": "none",
    "cudagraph_capture_sizes": (4, 16, 24),
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "long_prefill_token_threshold": 8,
    "speculative_config": {"method": "draft_model", "model": "the hash", "num_speculative_tokens": 3},
}
EVENTS = frozenset({"few_pages", "late_arrivals"})


def run(seed: int, **overrides: Any) -> World:
    world = World(seed, {**DRAFTED, **overrides}, EVENTS, is_recurrent=True)
    world.run()
    return world


def faults(**overrides: Any) -> list[Exception]:
    found: list[Exception] = []
    for seed in range(2):
        try:
            run(seed, **overrides)
        except (SimError, HostSyncError, AssertionError) as error:
            found.append(error)
    return found


def test_every_token_is_right() -> None:
    """Some of the worlds of ``test_seeds`` are such as well."""
    World(1, is_recurrent=True).run()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_worlds() -> None:
    for seed in range(200):
        World(seed, is_recurrent=True).run()


def test_drafts_are_rolled_back_in_graphs_with_two_steps_in_flight() -> None:
    """What the faults below are planted into."""
    run(1)
    stats = run(0, cudagraph_mode="full").core.stats
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9, "accepted drafts, and rejected ones"


def test_a_sixth_of_all_worlds_is_recurrent() -> None:
    assert [seed for seed in range(18) if World(seed).is_recurrent] == [2, 8]  # in 14 all begin alike


def planted(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Into what the real builder says of a batch."""
    right = GDNBackend.build

    def build(self: GDNBackend, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        return change(common, right(self, common))  # type: ignore[no-any-return]

    monkeypatch.setattr(GDNBackend, "build", build)


def test_a_step_that_goes_on_from_behind_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_state(common: CommonAttentionMetadata, built: GDNAttentionMetadata) -> GDNAttentionMetadata:
        # As if all that a step computes were accepted: the position of its last living token.
        return replace(built, positions=(common.seq_lens - 1).clamp(min=0))

    planted(monkeypatch, last_state)
    found = faults()
    assert len(found) == 2 and "tokens" in str(found[0]), found


@pytest.mark.parametrize(("inputs", "states"), [(-2, 0), (0, -1)])
def test_a_ring_that_is_too_short(monkeypatch: pytest.MonkeyPatch, inputs: int, states: int) -> None:
    right = DeltaNetSpec.ring_lengths

    def short(self: DeltaNetSpec, num_drafts: int) -> tuple[int, int]:
        num_inputs, num_states = right(self, num_drafts)
        return num_inputs + inputs, max(1, num_states + states)

    monkeypatch.setattr(DeltaNetSpec, "ring_lengths", short)
    assert len(faults()) == 2


def test_pages_that_are_shared_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**DRAFTED, "enable_prefix_caching": True, "speculative_config": None, "block_size": 4}
    events = frozenset({"shared_prefixes", "late_arrivals", "follow_ups"})
    asked = World(0, options, events, is_recurrent=True)
    asked.run()
    assert (asked.core.stats.num_cached_tokens, asked.core.stats.prefix_cache_refused) == (0, 1)
    monkeypatch.setattr(resolve, "_prefix_refusal", lambda _options, _model: "")
    with pytest.raises(AssertionError, match="tokens"):
        World(0, options, events, is_recurrent=True).run()


# --- report 003: a mask on the device, and repeat_interleave without a size ---------------------------


def device_mask(common: CommonAttentionMetadata) -> None:
    speculates = common.query_start_loc.diff() > 1
    assert common.seq_lens[speculates].shape[0] >= 0


def no_output_size(common: CommonAttentionMetadata) -> None:
    assert torch.repeat_interleave(common.query_start_loc.diff()).shape[0] >= 0


@pytest.mark.parametrize("fault", [device_mask, no_output_size])
@pytest.mark.parametrize("mode", ["none", "full", "piecewise"])
def test_shapes_that_depend_on_values(monkeypatch: pytest.MonkeyPatch, fault: Any, mode: str) -> None:
    right = gdn.spec_sequence_masks

    def faulty(common: CommonAttentionMetadata) -> Tensor:
        fault(common)
        return right(common)

    monkeypatch.setattr(gdn, "spec_sequence_masks", faulty)
    with pytest.raises((HostSyncError, SimError), match=r"test_recurrent\.py"):  # names the line that did it
        run(0, cudagraph_mode=mode)


def test_a_mask_of_the_device_that_the_builder_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder itself: what it does with a mask on the host it must not do with one on the device."""
    monkeypatch.setattr(
        gdn, "spec_sequence_masks", lambda common: common.query_start_loc[: common.num_reqs + 1].diff() > 1
    )
    with pytest.raises((HostSyncError, SimError)):
        run(0)
