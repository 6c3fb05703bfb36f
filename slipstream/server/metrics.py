"""Prometheus metrics: what the server counts of requests, and what the engine counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from slipstream.engine.stats import STEP_SECONDS, EngineStats
from slipstream.engine.stats import Histogram as StepHistogram
from slipstream.output import SYNTHETIC_WARNING
from slipstream.server.counters import CounterLayout, SharedCounters, histogram_names

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_GAUGES = {
    "num_waiting": "Requests that wait to be admitted.",
    "num_running": "Requests that are running on the device.",
    "num_pages": "Pages of the KV cache.",
    "num_free_pages": "Pages of the KV cache that are free or can be evicted.",
    "prefix_cache_refused": "1 if prefix caching is enabled but the model does not allow it; the log says why.",
    "num_graphs": "Recorded graphs.",
    "num_missing_graphs": "Graphs still to be captured when the engine is idle.",
    "graph_bytes": "Device memory used by captured graphs.",
    "draft_length": "Current draft length.",
}
_COUNTERS = {
    "num_steps": "Steps launched.",
    "num_tokens_computed": "Prompt and output tokens that the model has computed.",
    "num_tokens_out": "Output tokens.",
    "num_requests_finished": "Requests that that have ended.",
    "num_preemptions": "Requests preempted for lack of pages.",
    "num_drains": "Times the scheduler waited for older steps to be collected before it could continue.",
    "num_prompt_tokens": "Prompt tokens of admitted requests.",
    "num_cached_tokens": "Prompt tokens found in the prefix cache.",
    "num_sync_violations": "Hidden synchronisations with the device that the guard refused.",
    "num_draft_steps": "Verifications of a request's drafts.",
    "num_draft_tokens": "Draft tokens that were verified.",
    "num_accepted_tokens": "Draft tokens that were accepted.",
}
_COUNTERS_BY_POSITION = {
    "num_draft_tokens_at": "Draft tokens that were verified, by draft position.",
    "num_accepted_tokens_at": "Draft tokens that were accepted, by draft position.",
}


class _EngineCollector:
    """Reads the engine's counters when the metrics are scraped."""

    def __init__(
        self, stats: Callable[[], EngineStats], num_restarts: Callable[[], int], is_synthetic: bool = False
    ) -> None:
        self._stats = stats
        self._num_restarts = num_restarts
        self._is_synthetic = is_synthetic

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"slipstream_{name.removeprefix('num_')}", text, value=getattr(stats, name))
        used = 1 - stats.num_free_pages / max(1, stats.num_pages) if stats.num_pages else 0.0
        yield GaugeMetricFamily("slipstream_kv_cache_usage", "Share of the KV cache in use.", value=used)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"slipstream_{name.removeprefix('num_')}", text, value=getattr(stats, name))
        yield from self._drafts(stats)
        for name, text, value in (
            ("masked_steps", "Steps with constrained requests.", stats.num_masked_steps),
            ("mask_wait_seconds", "Time that the host waited for masks of constrained requests.", stats.mask_wait_s),
            ("mask_pause_seconds", "Time that the device waited in such steps.", stats.mask_pause_s),
        ):
            yield CounterMetricFamily(f"slipstream_{name}", text, value=value)
        yield CounterMetricFamily("slipstream_engine_restarts", "Engines that died.", value=self._num_restarts())
        yield _histogram("slipstream_step_seconds", "Time of a step.", stats.step_s)
        yield _histogram(
            "slipstream_host_step_seconds", "Of that, everything but waiting for the device.", stats.host_s
        )

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text in _COUNTERS_BY_POSITION.items():
            short = name.removeprefix("num_").removesuffix("_at")
            family = CounterMetricFamily(f"slipstream_{short}_per_position", text, labels=["position"])
            for position, count in enumerate(getattr(stats, name)):
                family.add_metric([str(position)], count)
            yield family
        mean = "Mean tokens per verification: the accepted drafts and the target's own token; 1 without drafts."
        yield GaugeMetricFamily("slipstream_mean_accepted_length", mean, value=stats.mean_accepted_length)
        if self._is_synthetic:
            yield GaugeMetricFamily("slipstream_synthetic_acceptance", SYNTHETIC_WARNING, value=1)


def _histogram(name: str, text: str, values: StepHistogram) -> HistogramMetricFamily:
    buckets, seen = [], 0
    for edge, count in zip((*STEP_SECONDS, float("inf")), values.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if edge == float("inf") else str(edge), float(seen)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=values.total)


ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/classify",
    "/v1/models",
    "/v1/models/{name:path}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/version",
    "/metrics",
)
_OTHER = "other"  # a client must not be able to create new time series
_STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 499, 500, 503)
_REASONS = ("stop", "length", "abort", "error")
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "time_between_tokens_seconds": "Between tokens of a stream, as they are sent.",
    "request_seconds": "From arrival to the end.",
}
LAYOUT = CounterLayout(
    ["open", "refused"]
    + [f"requests:{path}:{status}" for path in (*ROUTES, _OTHER) for status in (*_STATUSES, _OTHER)]
    + [f"ended:{reason}" for reason in _REASONS]
    + [name for histogram in _HISTOGRAMS for name in histogram_names(histogram, _SECONDS)]
)


class ServerMetrics:
    """A registry of its own: two servers in one process do not mix. ``counters`` are those of all front ends."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        num_restarts: Callable[[], int],
        is_synthetic: bool = False,
        counters: SharedCounters | None = None,
    ) -> None:
        self.counters = counters or SharedCounters(LAYOUT)
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, num_restarts, is_synthetic))
        self.registry.register(_FrontEndCollector(self.counters))
        self.time_to_first_token, self.time_between_tokens, self.request_time = (
            self.counters.histogram(name, _SECONDS) for name in _HISTOGRAMS
        )

    @property
    def num_open(self) -> int:
        """Requests that have not ended, over all front ends. Each choice counts."""
        return int(self.counters.total("open"))

    def open(self, count: int) -> None:
        self.counters.add("open", count)

    def close(self, count: int) -> None:
        self.counters.add("open", -count)

    def refuse(self) -> None:
        self.counters.add("refused")

    def end(self, reason: str, count: int = 1) -> None:
        self.counters.add(f"ended:{reason}", count)

    def count_request(self, path: str | None, status: int) -> None:
        known = status if status in _STATUSES else _OTHER
        self.counters.add(f"requests:{path if path in ROUTES else _OTHER}:{known}")

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _FrontEndCollector:
    """Sums of the front ends' counters."""

    def __init__(self, counters: SharedCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        total = self._counters.total
        requests = CounterMetricFamily("slipstream_http_requests", "HTTP requests.", labels=["path", "status"])
        for path in (*ROUTES, _OTHER):
            for status in (*_STATUSES, _OTHER):
                if count := total(f"requests:{path}:{status}"):
                    requests.add_metric([path, str(status)], count)
        yield requests
        refused = "Requests refused because the queue was full."
        yield CounterMetricFamily("slipstream_requests_refused", refused, value=total("refused"))
        given = "Continuations that were given to the engine and have not ended."
        yield GaugeMetricFamily("slipstream_open_completions", given, value=total("open"))
        ended = CounterMetricFamily("slipstream_completions", "Continuations by how they ended.", labels=["reason"])
        for reason in _REASONS:
            if count := total(f"ended:{reason}"):
                ended.add_metric([reason], count)
        yield ended
        for name, text in _HISTOGRAMS.items():
            buckets, seconds = self._counters.histogram(name, _SECONDS).totals()
            yield HistogramMetricFamily(f"slipstream_{name}", text, buckets=buckets, sum_value=seconds)
