from __future__ import annotations

import pytest

from slipstream.commands.measure import Arrival, BatchRun, decode_rate
from slipstream.errors import ConfigError


def simulate(starts: list[int], output_len: int, *, step_s: float, prefill_s: float, tokens: int = 1) -> list[Arrival]:
    """Arrivals of an engine that begins request i in step ``starts[i]``; a step that begins one takes longer."""
    arrivals = []
    now, counts = 100.0, [0] * len(starts)
    for step in range(max(starts) + output_len):
        now += prefill_s if step in starts else step_s
        for idx, begun in enumerate(starts):
            if step < begun or counts[idx] == output_len:
                continue
            new = min(1 if step == begun else tokens, output_len - counts[idx])
            counts[idx] += new
            # Requests of one step are handed over one after another.
            arrivals.append(Arrival(idx, now + 1e-5 * idx, new, counts[idx] == output_len))
    return arrivals


@pytest.mark.parametrize("starts", [[0], [0, 0, 0], [0, 1, 2], [3, 0, 1], [0, 0, 5]])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rate_is_that_of_full_decode_steps(starts: list[int], tokens: int) -> None:
    arrivals = simulate(starts, 40, step_s=0.02, prefill_s=1.0, tokens=tokens)
    # The order within a step is fixed, so the handing over adds nothing.
    assert decode_rate(arrivals) == pytest.approx(len(starts) * tokens / 0.02, rel=1e-6)


def test_tail_with_a_smaller_batch_does_not_count() -> None:
    arrivals = simulate([0, 8], 20, step_s=0.02, prefill_s=1.0)
    slow_tail = [a._replace(time=a.time * 2) if i > 30 else a for i, a in enumerate(arrivals)]
    assert decode_rate(slow_tail) == pytest.approx(2 / 0.02, rel=1e-6)


def test_batch_that_never_decodes_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise --output-len"):
        decode_rate(simulate([0, 9], 5, step_s=0.02, prefill_s=1.0))


def test_time_to_first_token_is_the_mean() -> None:
    arrivals = simulate([0, 1], 4, step_s=0.02, prefill_s=1.0)
    assert BatchRun(100.0, arrivals, []).first_token_s == pytest.approx(1.5, abs=1e-4)


def test_drafts_of_all_requests_are_counted_together() -> None:
    fared = [(0, 0), (3, 2), (0, 0), (2, 0), (1, 1)]
    arrivals = [Arrival(idx % 2, 1.0 + idx, 1, False, *counts) for idx, counts in enumerate(fared)]
    drafts = BatchRun(0.0, arrivals, []).drafts
    assert (drafts.num_steps, drafts.num_drafts, drafts.num_accepted) == (3, 6, 3)
    assert drafts.num_accepted_at == [2, 1, 0]
