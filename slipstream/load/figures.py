"""Metrics of a run from its columns: rates, and the distributions of latencies. All times returned are in ms.

TTFT is from the start of sending to the first event with text, an inter-token gap the time between two such events of
one response, TPOT the mean time per token after the first one, and e2e the time to the complete response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.load.records import FLOATS, INTS, UNFINISHED, Records

METRICS = ("ttft", "itl", "tpot", "e2e")
PERCENTILES = (50, 95, 99)
# A process that is busy for more of its time than this may have read tokens late.
BUSY = 0.85

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Samples:
    """Times in ms. ``itl`` has one per gap; the others have one per request, NaN where a request has none."""

    ttft: FLOATS
    itl: FLOATS
    tpot: FLOATS
    e2e: FLOATS
    tokens: INTS  # output tokens of each request


def take_samples(records: Records) -> Samples:
    """Of the requests that succeeded."""
    ok = records.is_ok
    start, end, num_events = records.start[ok], records.end[ok], records.num_events[ok]
    tokens = output_tokens(records)
    first, last = np.full(len(start), np.nan), np.full(len(start), np.nan)
    stops = np.cumsum(num_events)
    has_text = num_events > 0
    first[has_text] = records.event_times[(stops - num_events)[has_text]]
    last[has_text] = records.event_times[stops[has_text] - 1]
    gaps = np.diff(records.event_times)
    within = np.ones(len(gaps), bool)
    # There is no gap between the last event of one response and the first of the next.
    within[stops[has_text][:-1] - 1] = False
    many = has_text & (tokens > 1)
    tpot = np.full(len(start), np.nan)
    tpot[many] = (last - first)[many] / (tokens[many] - 1)
    return Samples(1e3 * (first - start), 1e3 * gaps[within], 1e3 * tpot, 1e3 * (end - start), tokens)


def output_tokens(records: Records) -> INTS:
    """Of the requests that succeeded: as the server counted, else one for each event."""
    ok = records.is_ok
    told = records.output_tokens[ok]
    return np.where(told >= 0, told, records.num_events[ok])


def measure(records: Records, limits: Mapping[str, float]) -> Row:
    """The metrics of one run. Rates count successful requests, from the first start to the last end of these."""
    ok, samples = records.is_ok, take_samples(records)
    num_ok = int(ok.sum())
    seconds = float(records.end[ok].max() - records.start[ok].min()) if num_ok else 0.0
    num_events = int(records.num_events.sum())
    row: Row = {
        "tok_s": _rate(int(samples.tokens.sum()), seconds),
        "request_s": _rate(num_ok, seconds, digits=3),
        "seconds": round(seconds, 3),
        "requests": num_ok,
        "failed": int((records.outcome >= 0).sum()),
        "unfinished": int((records.outcome == UNFINISHED).sum()),
    }
    if reasons := count_failures(records):
        row["failures"] = reasons
    for name in METRICS:
        row |= _distribution(name, getattr(samples, name))
    row["output_tokens"] = int(samples.tokens.sum())
    row["tokens_counted_by"] = _counted_by(records)
    row["tokens_an_event"] = round(row["output_tokens"] / num_events, 3) if num_events else None
    prompts = records.prompt_tokens[ok & (records.prompt_tokens >= 0)]
    row["prompt_tokens_mean"] = round(float(prompts.mean()), 1) if len(prompts) else None
    row["late_p99_ms"] = _percentile(1e3 * (records.start - records.due), 99)
    if limits:
        row |= _goodput(samples, limits, seconds, len(records.outcome) - row["unfinished"])
    return row | _client(records)


def count_failures(records: Records) -> dict[str, int]:
    """How many requests failed for each reason, the most frequent first."""
    counts = Counter(int(outcome) for outcome in records.outcome if outcome >= 0)
    return {records.failures[idx]: count for idx, count in counts.most_common()}


def most_at_once(records: Records) -> int:
    """The largest number of requests under way at one time."""
    times = np.concatenate([records.start, records.end])
    steps = np.concatenate([np.ones(len(records.start), np.int64), -np.ones(len(records.end), np.int64)])
    # A request that ends when another starts does not overlap it.
    return int(np.cumsum(steps[np.lexsort((steps, times))]).max(initial=0))


def keeps_limits(samples: Samples, limits: Mapping[str, float]) -> Any:
    """Whether each request kept all limits. One without a value for a limit, such as TPOT of one token, keeps it."""
    good = np.ones(len(samples.ttft), bool)
    for name, limit in limits.items():
        good &= ~(getattr(samples, name) > limit)
    return good


def _goodput(samples: Samples, limits: Mapping[str, float], seconds: float, num_requests: int) -> Row:
    num_good = int(keeps_limits(samples, limits).sum())
    return {
        "goodput_limits_ms": dict(limits),
        "goodput_request_s": _rate(num_good, seconds, digits=3),
        "goodput_share": round(num_good / num_requests, 4) if num_requests else None,
    }


def _client(records: Records) -> Row:
    """The client's own load: CPU share of each process, and microseconds for each event."""
    shares = [round(process["cpu_s"] / process["wall_s"], 3) if process["wall_s"] else 0.0 for process in records.cpu]
    events = sum(process["num_events"] for process in records.cpu)
    spent = sum(process["cpu_s"] for process in records.cpu)
    return {"client_cpu": shares, "client_us_an_event": round(1e6 * spent / events, 2) if events else None}


def _counted_by(records: Records) -> str:
    told = records.output_tokens[records.is_ok] >= 0
    if told.all():
        return "usage"
    return "usage and events" if told.any() else "events"


def _distribution(name: str, values: FLOATS) -> Row:
    values = values[~np.isnan(values)]
    mean = round(float(values.mean()), 3) if len(values) else None
    percentiles = {f"{name}_p{percent}_ms": _percentile(values, percent) for percent in PERCENTILES}
    return {f"{name}_mean_ms": mean, **percentiles}


def _percentile(values: FLOATS, percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if len(values) else None


def _rate(count: int, seconds: float, *, digits: int = 2) -> float:
    return round(count / seconds, digits) if seconds else 0.0
