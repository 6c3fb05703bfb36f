"""A draft that a step does not check: the device says whether it was the token that came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.device.sim import SimDevice
from slipstream.engine.build import Engine
from slipstream.plan import Composition
from slipstream.scheduler.draft_length import FixedLength, Lengths
from tests.engine.drive import make_request
from tests.sim.world import World
from tests.speculations import speculation


class Unchecked(FixedLength):
    """Every other step makes a draft, and none checks any."""

    def __init__(self) -> None:
        super().__init__(0)
        self.said: list[int] = []

    def launched(self, composition: Composition) -> None:
        self._lengths = Lengths(0, 0 if composition.num_next_drafts else 1)

    def collected(self, composition: Composition, num_accepted: Sequence[int], would_accept: Sequence[int]) -> None:
        assert not any(num_accepted)
        self.said = list(would_accept)


def outcomes(engine: Engine, num_steps: int) -> list[tuple[bool, bool, bool]]:
    """Of every decode: whether there was a draft, whether it was the token, what the device said."""
    core, policy = engine.core, Unchecked()
    core.scheduler.drafts.length = policy
    rows = core.runner.rows
    core.add(make_request("r", [7, 8, 9] * 6, max_tokens=num_steps + 8, ignore_eos=True))
    found = []
    for _ in range(num_steps):
        (row,) = [int(state.row) for state in core.scheduler.running] or [0]
        position = int(rows.num_tokens[row])
        has_draft, draft = int(rows.num_drafts[row]) > 0, int(rows.token_ids[row, position])
        new = [token for update in core.step() for token in update.token_ids]
        found.append((has_draft, has_draft and draft == new[0], bool(policy.said[0])))
    return found[1:]


@pytest.mark.parametrize(("method", "verify"), [("ngram", "match"), ("ngram", "rejection"), ("draft_model", "match")])
def test_it_is_the_token_that_came(
    make_engine: Callable[..., Engine], near_folder: Path, method: str, verify: str
) -> None:
    own: dict[str, Any] = {"model": str(near_folder)} if method == "draft_model" else {"prompt_lookup_min": 1}
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": True, "verify": verify, **own}
    found = outcomes(make_engine(speculative_config=config, steps_in_flight=1), 80)
    assert [said for _, _, said in found] == [right for _, right, _ in found]
    num_right, num_drafts = sum(right for _, right, _ in found), sum(has_draft for has_draft, _, _ in found)
    assert 0 < num_right < num_drafts if method == "ngram" else num_right > 5, "otherwise nothing is shown"


@pytest.mark.parametrize(
    ("method", "verify", "knows_acceptance"),
    [
        ("eagle3", "match", True),
        ("eagle3", "synthetic", True),
        ("eagle3", "rejection", False),
        ("draft_model", "rejection", False),
        ("ngram", "rejection", True),
    ],
)
def test_whose_drafts_have_noise_of_their_own_has_them_checked(
    method: Any, verify: Any, knows_acceptance: bool
) -> None:
    """Speculative sampling accepts more than is equal; what a lookup finds has no noise."""
    assert speculation(method, 3, verify=verify, adaptive=True).knows_acceptance is knows_acceptance


@pytest.mark.parametrize("mode", ["full", "piecewise", "none"])
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_with_forced_acceptance_it_is_whatever_is_forced(mode: str, rate: float) -> None:
    """In every graph mode: some have room for drafts that are not there."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": True, "prompt_lookup_min": 1}
    config |= {"verify": "synthetic", "acceptance_rates": [rate] * 3}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 64, "num_gpu_blocks_override": 64}
    world = World(4, {"cudagraph_mode": mode, "speculative_config": config, "steps_in_flight": 1, **sizes})
    world.device = SimDevice(1)
    core = world._build(world.resolve())
    while core.use_idle_time():
        pass
    policy = core.scheduler.drafts.length = Unchecked()
    core.add(make_request("r", [7, 8, 9] * 6, max_tokens=30, ignore_eos=True))
    num_said = num_drafts = 0
    while core.has_work:
        has_draft = bool(world.device.peek(core.runner.rows.num_drafts).any())
        core.step()
        num_said, num_drafts = num_said + policy.said[0], num_drafts + has_draft
    assert num_drafts > 5
    assert num_said == (num_drafts if rate else 0)
