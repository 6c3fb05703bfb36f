"""The settings of ``slipstream bench serve``; the command line has an option for every field."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import option
from slipstream.errors import ConfigError, nearest

CONCURRENCY = "1,8,32"
# Requests of a run, if neither --requests nor a data set gives a number.
_REQUESTS_A_STREAM, _LEAST_REQUESTS, _OPEN_REQUESTS = 4, 16, 200
LIMITS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: a closed loop of some streams, an open loop of some rate, or neither for a trace."""

    streams: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.streams is not None:
            return f"{self.streams} stream{'s' if self.streams > 1 else ''}"
        return "trace" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True)
class LoadSettings:
    url: str = option("http://127.0.0.1:8000", "Address of the server.")
    model: str | None = option(None, "Model name in the API; the first one listed if unset.")
    api: str = option("chat", "API to use: chat or completions.")
    api_key: str | None = option(None, "Key to send as a bearer token.")
    concurrency: str | None = option(
        None,
        "Closed loop: streams that each send their next request when one has ended; several numbers, with commas, run "
        f"one after another. {CONCURRENCY} if neither this nor --rate nor --trace.",
    )
    rate: str | None = option(
        None,
        "Open loop: requests per second, however many are under way; several, separated by commas; inf for all.",
    )
    burstiness: float = option(1.0, "Burstiness of an open loop's arrivals: 1 is a Poisson process, less is burstier.")
    trace: str | None = option(
        None, "Open loop from a JSONL file: timestamp, and a prompt or lengths; Mooncake's traces work."
    )
    trace_unit: str = option("auto", "Unit of a trace's timestamps: s, ms, or auto (ms where it has hash_ids).")
    trace_speed: float = option(1.0, "Replay a trace this many times as fast.")
    requests: int | None = option(
        None,
        "Requests of each run; 4 for each stream and at least 16, 200 in an open loop, or all of a data set or trace "
        "if unset.",
    )
    warmup: int = option(1, "Warm-up requests before each run.")
    prompt_len: int = option(128, "Random words in each prompt, the shared ones included.")
    output_len: int = option(128, "Output tokens of each request, where a data set does not say.")
    len_spread: float = option(0.0, "Draw both lengths uniformly from this fraction below to this fraction above.")
    prefix_len: int = option(0, "Words of a prefix shared by all prompts.")
    vocab_size: int | None = option(
        None, "Random token ids below this instead of words: exact lengths, with --api completions."
    )
    dataset: str | None = option(
        None, "JSONL with messages or prompt, and max_tokens if it differs; or Spec-Bench's question.jsonl."
    )
    temperature: float = option(0.0, "Randomness of the answers; 0 is greedy.")
    ignore_eos: bool | None = option(
        None, "Send ignore_eos, an extension, so that every response has its full length; on unless a data set is used."
    )
    include_usage: bool = option(True, "Ask for token counts; without them events are counted.")
    extra_body: Mapping[str, Any] | None = option(None, "More fields of every request, as JSON; null removes one.")
    timeout_s: float = option(600.0, "Longest silence of the server during a request, in seconds.")
    processes: int | None = option(None, "Client processes; one for every four cores, at most eight, if unset.")
    goodput: tuple[str, ...] = option(
        (), "Goodput: limits in ms that a request must keep, such as: ttft:200 tpot:20 e2e:5000."
    )
    seed: int | None = option(
        None, "Seed of prompts and arrivals; random if unset, so that no prompt is cached from an earlier run."
    )
    case: str | None = option(None, "Name of the rows in the result; MODEL+serve if unset.")

    def __post_init__(self) -> None:
        if self.api not in ("chat", "completions"):
            raise ConfigError(f"--api must be chat or completions, not '{self.api}'")
        if self.trace_unit not in ("auto", "s", "ms"):
            raise ConfigError(f"--trace-unit must be auto, s or ms, not '{self.trace_unit}'")
        for name, low in (("requests", 1), ("warmup", 0), ("prompt_len", 1), ("output_len", 1), ("prefix_len", 0)):
            self._check_least(name, low)
        for name, low in (("vocab_size", 2), ("processes", 1), ("seed", 0)):
            self._check_least(name, low)
        for name in ("burstiness", "trace_speed", "timeout_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{_flag(name)} must be above 0, not {value:g}")
        if not 0 <= self.len_spread < 1:
            raise ConfigError(f"--len-spread must be at least 0 and below 1, not {self.len_spread:g}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature must be at least 0, not {self.temperature:g}")
        if self.prefix_len >= self.prompt_len:
            raise ConfigError(f"--prefix-len {self.prefix_len} leaves no word of its own to --prompt-len")
        if self.extra_body is not None and not isinstance(self.extra_body, dict):
            raise ConfigError("--extra-body must be a JSON object")
        self._check_combinations()
        most = max(point.streams or 0 for point in self.points())
        if self.requests is not None and self.requests < most:
            raise ConfigError(f"--requests {self.requests} are fewer than the {most} streams; raise it")
        self.limits()

    def _check_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and value < low:
            raise ConfigError(f"{_flag(name)} must be at least {low}, not {value}")

    def _check_combinations(self) -> None:
        given = [_flag(name) for name in ("concurrency", "rate", "trace") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are different loads; give one of them")
        if self.trace is not None and self.dataset is not None:
            raise ConfigError("--trace and --dataset both say what is asked; give one of them")
        if self.vocab_size is not None and (self.api == "chat" or self.dataset or self.trace):
            raise ConfigError(
                "--vocab-size makes prompts of token ids, for synthetic prompts and --api completions only"
            )

    def points(self) -> list[Point]:
        """The measurements of this command, in order."""
        if self.trace is not None:
            return [Point()]
        if self.rate is not None:
            return [Point(rate=_rate(part.strip(), self.rate)) for part in self.rate.split(",")]
        parts = [part.strip() for part in (self.concurrency or CONCURRENCY).split(",")]
        if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 100_000 for part in parts):
            raise ConfigError(
                f"--concurrency must be positive numbers separated by commas, such as 1,8,32, not '{self.concurrency}'"
            )
        return [Point(streams=int(part)) for part in dict.fromkeys(parts)]

    def with_limits(self, more: Sequence[str]) -> LoadSettings:
        """Adds goodput limits, which may follow the first one without the option's name."""
        if not more:
            return self
        if not self.goodput:
            raise ConfigError(f"unexpected argument '{more[0]}'; see 'slipstream bench serve --help'")
        return replace(self, goodput=(*self.goodput, *more))

    def limits(self) -> dict[str, float]:
        """Of goodput, in milliseconds."""
        found: dict[str, float] = {}
        for part in re.split(r"[\s,]+", " ".join(self.goodput).strip()):
            if not part:
                continue
            name, _, value = part.partition(":")
            if name not in LIMITS:
                raise ConfigError(
                    f"--goodput knows {', '.join(LIMITS)}, not '{name}'{nearest(name, LIMITS)}; such as ttft:200"
                )
            found[name] = _positive(value, f"--goodput {part}: the limit")
        return found

    def num_requests(self, point: Point, available: int | None) -> int:
        """Requests of one run. ``available`` is the size of a data set or trace."""
        if self.requests is not None:
            return self.requests if point != Point() else min(self.requests, available or self.requests)
        if available is not None:
            return max(available, point.streams or 0)
        if point.streams is None:
            return _OPEN_REQUESTS
        return max(_LEAST_REQUESTS, _REQUESTS_A_STREAM * point.streams)

    def num_processes(self, num_cores: int, point: Point, num_requests: int) -> int:
        most = min(num_requests, point.streams or num_requests)
        return min(most, self.processes or max(1, min(8, num_cores // 4)))

    @property
    def sends_ignore_eos(self) -> bool:
        return self.dataset is None if self.ignore_eos is None else self.ignore_eos


def _rate(part: str, given: str) -> float:
    if part == "inf":
        return math.inf
    return _positive(part, f"--rate {given}: a rate")


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{what} must be a number above 0, not '{text}'")
    return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
