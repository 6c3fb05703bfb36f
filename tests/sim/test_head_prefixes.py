"""Heads and the prefix cache: the last slot of a page has keys of the next token, and pages of requests mix."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from tests.sim.oracle import expected_output
from tests.sim.world import Job, World

PAGE = 4
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 48,
    "max_model_len": 64,
    "block_size": PAGE,
    "num_gpu_blocks_override": 64,
    "steps_in_flight": 2,
    "cudagraph_mode": "none",
    "enable_prefix_caching": True,
}
SHARED = [17, 3, 44, 9, 52, 30, 8, 21, 5, 60, 33, 12, 40, 2, 27, 14]


def one_after_another(method: str, *prompts: list[int]) -> World:
    """Each request comes when those before it have ended. The world compares what is drafted and accepted."""
    config = {"method": method, "num_speculative_tokens": 3} | ({} if method == "mtp" else {"model": "the hash"})
    world = World(1, {**SETTINGS, "speculative_config": config}, frozenset({"drafts", "prefix_caching"}))
    world.jobs = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, seed=i).with_defaults(SamplingParams())
        request = Request(f"r{i}", tuple(prompt), params, (), len(prompt) + 12)
        world.jobs.append(Job(request, 40 * i, None, *expected_output(request)))
    world.run()
    return world


def num_found(world: World) -> int:
    return world.core.scheduler.stats.num_cached_tokens


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_a_page_is_not_taken_from_one_who_went_on_otherwise(method: str) -> None:
    """The first leaves two pages, the second of which is followed by another token than in the others' prompts.

    The third finds pages of both, so it is not enough to compute the last one again.
    """
    first = [*SHARED[: 2 * PAGE], 1]
    world = one_after_another(method, first, [*SHARED, 59], [*SHARED, 58, 6])
    # The second finds one page of the first; the third that page and two of the second, whose fourth went on otherwise.
    assert num_found(world) == PAGE + 3 * PAGE


def test_the_last_page_is_found_where_the_token_behind_it_is_the_same() -> None:
    world = one_after_another("eagle3", [*SHARED, 59], [*SHARED, 59, 4])
    assert num_found(world) == 4 * PAGE


def test_without_a_head_what_comes_behind_a_page_does_not_matter() -> None:
    world = one_after_another("draft_model", [*SHARED, 59], [*SHARED, 58])
    assert num_found(world) == 4 * PAGE
