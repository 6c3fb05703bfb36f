from __future__ import annotations

import random
from statistics import mean

import numpy as np
import pytest

from slipstream.load.figures import count_failures, measure, most_at_once, take_samples
from slipstream.load.records import Records
from tests.load.runs import Run


def test_times_of_requests_drawn_at_random_against_plain_loops() -> None:
    generator, run = random.Random(3), Run()
    ttft, itl, tpot, e2e, total = [], [], [], [], 0
    for idx in range(200):
        start = generator.uniform(0, 5)
        gaps = [generator.expovariate(20) for _ in range(generator.randint(0, 12))]
        events = [start + generator.uniform(0.01, 1)]
        for gap in gaps:
            events.append(events[-1] + gap)
        end, tokens = events[-1] + 0.01, len(events) * generator.randint(1, 3)
        if idx % 7 == 3:
            run.failed(start, end, "HTTP 500: no")
            continue
        run.ok(start, events, end, tokens=tokens if idx % 2 else -1)
        tokens = tokens if idx % 2 else len(events)
        total += tokens
        ttft.append(1e3 * (events[0] - start))
        itl += [1e3 * gap for gap in gaps]
        e2e.append(1e3 * (end - start))
        if tokens > 1:
            tpot.append(1e3 * (events[-1] - events[0]) / (tokens - 1))
    row = measure(run.records(), {})
    for name, values in (("ttft", ttft), ("itl", itl), ("tpot", tpot), ("e2e", e2e)):
        assert row[f"{name}_mean_ms"] == pytest.approx(mean(values), abs=6e-4)
        for percent in (50, 95, 99):
            assert row[f"{name}_p{percent}_ms"] == pytest.approx(np.percentile(values, percent), abs=6e-4)
    assert row["output_tokens"] == total
    assert row["tokens_counted_by"] == "usage and events"
    assert row["failures"] == {"HTTP 500: no": 200 - len(ttft)}


def test_percentiles_lie_between_the_values_beside_them() -> None:
    """0 to 100 ms in steps of 1: the percentile is the value itself, whatever the rule between two values."""
    run = Run()
    for idx in range(101):
        run.ok(0.0, [idx / 1e3], 1.0)
    row = measure(run.records(), {})
    assert [row[f"ttft_{name}_ms"] for name in ("mean", "p50", "p95", "p99")] == [50.0, 50.0, 95.0, 99.0]


def test_rates_are_of_what_ended_well() -> None:
    run = Run()
    run.failed(0.0, 90.0, "silent for more than 60 s")
    run.ok(1.0, [1.5, 2.0], 3.0, tokens=10)
    run.ok(2.0, [2.5, 4.0], 5.0, tokens=30)
    run.unfinished(4.0, 91.0)
    row = measure(run.records(), {})
    assert (row["seconds"], row["tok_s"], row["request_s"]) == (4.0, 10.0, 0.5)
    assert (row["requests"], row["failed"], row["unfinished"]) == (2, 1, 1)
    assert row["tokens_an_event"] == 10.0
    assert row["tokens_counted_by"] == "usage"


def test_origin_is_taken_off() -> None:
    run = Run()
    run.ok(1001.0, [1001.5], 1002.0)
    records = run.records(origin=1000.0)
    assert (records.start[0], records.event_times[0], records.end[0]) == (1.0, 1.5, 2.0)


def test_requests_without_text_or_with_one_event() -> None:
    run = Run()
    run.ok(0.0, [], 0.2, tokens=0)
    run.ok(0.0, [0.1], 0.2)
    run.ok(0.0, [0.1, 0.3], 0.5)
    run.ok(0.0, [], 0.2, tokens=0)
    samples = take_samples(run.records())
    np.testing.assert_allclose(samples.ttft, [np.nan, 100.0, 100.0, np.nan])
    np.testing.assert_allclose(samples.itl, [200.0])
    np.testing.assert_allclose(samples.tpot, [np.nan, np.nan, 200.0, np.nan])
    row = measure(run.records(), {})
    assert row["ttft_p99_ms"] == 100.0


def test_nothing_ended_well() -> None:
    run = Run()
    run.failed(0.0, 1.0, "connection refused")
    row = measure(run.records(), {"ttft": 1.0})
    assert (row["tok_s"], row["requests"], row["failed"], row["goodput_share"]) == (0.0, 0, 1, 0.0)
    assert row["ttft_p50_ms"] is row["itl_mean_ms"] is row["tokens_an_event"] is None


def hundred() -> Records:
    """Request i of 1 to 100: TTFT i ms, TPOT 101 - i ms over 11 tokens, and the end 1 ms after the last."""
    run = Run()
    for i in range(1, 101):
        first, gap = i / 1e3, (101 - i) / 1e3
        run.ok(0.0, [first + gap * event for event in range(11)], first + 10 * gap + 0.001)
    return run.records()


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ({"ttft": 30.5}, 30),  # i <= 30
        ({"tpot": 20.5}, 20),  # i >= 81
        ({"ttft": 60.5, "tpot": 60.5}, 20),  # 41 <= i <= 60
        ({"e2e": 501.5}, 44),  # 1011 - 9 i <= 501.5: i >= 57
        ({"ttft": 60.5, "tpot": 60.5, "e2e": 501.5}, 4),  # 57 <= i <= 60
        ({"ttft": 0.5}, 0),
        ({"ttft": 1e6}, 100),
    ],
)
def test_goodput_by_algebra(limits: dict[str, float], num_good: int) -> None:
    row = measure(hundred(), limits)
    assert row["goodput_share"] == num_good / 100
    # From 0 to the end of the slowest: 1 + 10 * 100 + 1 ms.
    assert row["goodput_request_s"] == pytest.approx(num_good / 1.002, abs=1e-3)
    assert row["goodput_limits_ms"] == limits


def test_goodput_counts_failures_and_lets_answers_of_one_token_be() -> None:
    run = Run()
    run.ok(0.0, [0.1], 0.2)
    run.failed(0.0, 0.1, "HTTP 500: no")
    run.unfinished(0.0, 0.2)
    assert measure(run.records(), {"tpot": 1.0})["goodput_share"] == 0.5


def test_most_at_once() -> None:
    run = Run()
    for start, end in ((0.0, 1.0), (0.5, 2.0), (1.0, 3.0), (2.0, 2.5), (9.0, 9.5)):
        run.ok(start, [end], end)
    assert most_at_once(run.records()) == 2  # one that ends as another starts is gone
    run.failed(0.6, 2.1, "HTTP 500: no")
    assert most_at_once(run.records()) == 3
    assert most_at_once(Run().records()) == 0


def test_client_figures_and_lateness() -> None:
    run = Run()
    run.ok(0.0, [0.1] * 50, 0.2)
    records = run.records(cpu={"cpu_s": 0.45, "wall_s": 0.5, "num_events": 50})
    both = Records.joined([records, run.records(cpu={"cpu_s": 0.05, "wall_s": 0.5, "num_events": 50})])
    row = measure(both, {})
    assert row["client_cpu"] == [0.9, 0.1]
    assert row["client_us_an_event"] == 5000.0
    both.due -= 0.25
    assert measure(both, {})["late_p99_ms"] == 250.0


def test_columns_of_several_processes_are_put_together() -> None:
    first, second = Run(), Run()
    first.ok(0.0, [1.0, 2.0], 3.0, tokens=2)
    first.failed(0.0, 1.0, "HTTP 500: request 17 failed")
    for _ in range(3):
        second.failed(0.0, 1.0, "connection reset")
    second.failed(0.0, 1.0, "HTTP 500: request 99 failed")
    second.failed(0.0, 1.0, "HTTP 429: slow down")
    second.ok(0.5, [5.0], 6.0)
    records = Records.joined([first.records(), second.records()])
    assert count_failures(records) == {
        "connection reset": 3,
        "HTTP 500: request 17 failed": 2,
        "HTTP 429: slow down": 1,
    }
    np.testing.assert_allclose(take_samples(records).ttft, [1000.0, 4500.0])
    np.testing.assert_allclose(take_samples(records).itl, [1000.0])
    assert len(records.cpu) == 2
