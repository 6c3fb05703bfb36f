"""A request's share of a step where the host ends it: more stop tokens than the device knows."""

from __future__ import annotations

import pytest

from slipstream.output import LogprobRow
from slipstream.plan import RowStatus, ScheduledRequest, StepPlan, StepResult
from slipstream.request import MAX_DEVICE_STOP_IDS, Request
from slipstream.sampling_params import SamplingParams
from slipstream.scheduler.collected_step import take_tokens
from slipstream.scheduler.request_state import RequestState

STOPS = tuple(range(100, 101 + MAX_DEVICE_STOP_IDS))
STOP = STOPS[-1]  # which the device does not look for


def state_of(**params: object) -> RequestState:
    sampling = SamplingParams.from_dict({"temperature": 0.0, "seed": 0, **params})
    return RequestState(Request("a", (1, 2), sampling, STOPS, 50), 0, [1, 2], num_cached_tokens=1)


def result_of(new: list[int], status: RowStatus = RowStatus.RUNNING) -> StepResult:
    """Three drafts were checked, and all but the last of the new tokens are accepted ones."""
    plan = StepPlan.from_requests(0, [ScheduledRequest("a", 1, 0, 4, 1, True, 3)])
    rows = [LogprobRow(1, [token_id], [-1.0]) for token_id in new]
    return StepResult(plan, [new], [status], [3], [max(0, len(new) - 1)], [0], [rows])


@pytest.mark.parametrize(
    ("new", "kept", "accepted", "reason"),
    [
        ([5, STOP, 7, 8], [5, STOP], 2, "stop"),
        ([STOP, 6, STOP, 8], [STOP], 1, "stop"),
        ([5, 6, 7, STOP], [5, 6, 7, STOP], 3, "stop"),
        ([5, 6], [5, 6], 1, None),
    ],
)
def test_nothing_after_the_first_stop_token_is_the_requests(
    new: list[int], kept: list[int], accepted: int, reason: str | None
) -> None:
    """Neither tokens nor their log probabilities, and drafts after it count as rejected."""
    state = state_of(logprobs=1)
    update = take_tokens(state, result_of(new), 0)
    assert update is not None
    assert (update.token_ids, update.finish_reason) == (kept, reason)
    assert update.stop_reason == (STOP if reason else None)
    assert (update.num_drafts, update.num_accepted) == (3, accepted)
    assert update.logprobs is not None and [row.token_ids for row in update.logprobs] == [[token] for token in kept]
    assert state.token_ids == [1, 2, *kept]
    assert update.num_cached_tokens == 1


def test_log_probabilities_of_a_neighbour_are_not_told() -> None:
    """The step has them for all rows if one request asks."""
    update = take_tokens(state_of(), result_of([5]), 0)
    assert update is not None and update.logprobs is None


def test_a_stop_token_comes_before_the_length_limit_that_it_meets() -> None:
    update = take_tokens(state_of(), result_of([5, STOP], RowStatus.LENGTH), 0)
    assert update is not None and update.finish_reason == "stop"


def test_a_step_that_brought_nothing_is_not_told() -> None:
    assert take_tokens(state_of(), result_of([]), 0) is None
    update = take_tokens(state_of(), result_of([], RowStatus.ERROR), 0)
    assert update is not None and update.finish_reason == "error"
