"""What ``slipstream bench serve`` may be told; the command line makes an option of every field."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.errors import ConfigError, nearest

CONCURRENCY = "1,8,32"
# Requests of a run, if neither --requests nor a data set says.
_REQUESTS_A_STREAM, _LEAST_REQUESTS, _OPEN_REQUESTS = 4, 16, 200
LIMITS = ("ttft", "tpot", "e2e")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: a closed loop of so many streams, an open loop of a rate, or neither for a trace."""

    streams: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.streams is not None:
            return f"{self.streams} stream{'s' if self.streams > 1 else ''}"
        return "trace" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True)
class LoadSettings:
    url: str = _option("http://127.0.0.1:8000", "Where the server listens.")
    model: str | None = _option(None, "Name of the model there; the first one that the server lists if unset.")
    api: str = _option("chat", "What is asked: chat or completions.")
    api_key: str | None = _option(None, "Key to send as a bearer token.")
    concurrency: str | None = _option(
        None,
        "Closed loop: streams that send their next request when one has ended; several, separated by commas, are run "
        f"one after another. {CONCURRENCY} if neither this nor --rate nor --trace.",
    )
    rate: str | None = _option(
        None, "Open loop: requests a second, however many are under way; several, separated by commas; inf for all."
    )
    burstiness: float = _option(
        1.0, "How even the arrivals of an open loop are: 1 is a Poisson process, less comes in bursts."
    )
    trace: str | None = _option(
        None, "Open loop as in a JSONL file: timestamp, and a prompt or lengths; Mooncake's traces are known."
    )
    trace_unit: str = _option("auto", "Unit of a trace's timestamps: s, ms, or auto (ms where it has hash_ids).")
    trace_speed: float = _option(1.0, "Play a trace so many times as fast.")
    requests: int | None = _option(
        None,
        "Requests of each run; 4 for each stream and at least 16, 200 in an open loop, or all of a data set or trace "
        "if unset.",
    )
    warmup: int = _option(1, "Requests before each run that are not counted.")
    prompt_len: int = _option(128, "Random words in each prompt, the shared ones included.")
    output_len: int = _option(128, "Most tokens of an answer, where a data set does not say.")
    len_spread: float = _option(0.0, "Draw both lengths evenly from this share below to this share above.")
    prefix_len: int = _option(0, "Words that all prompts begin with.")
    vocab_size: int | None = _option(
        None, "Prompts of token ids below this instead of words; exact lengths, with --api completions."
    )
    dataset: str | None = _option(
        None, "JSONL with messages or prompt, and max_tokens if it differs; or Spec-Bench's question.jsonl."
    )
    temperature: float = _option(0.0, "Randomness of the answers; 0 is greedy.")
    ignore_eos: bool | None = _option(
        None, "Send ignore_eos, an extension, so that every answer has its full length; on unless a data set is read."
    )
    include_usage: bool = _option(True, "Ask for the numbers of tokens; without them events are counted.")
    extra_body: Mapping[str, Any] | None = _option(None, "More fields of every request, as JSON; null takes one away.")
    timeout_s: float = _option(600.0, "Longest silence of the server during a request, in seconds.")
    processes: int | None = _option(None, "Client processes; one for each four cores, at most eight, if unset.")
    goodput: tuple[str, ...] = _option(
        (), "Limits in ms a request has to keep to count as good, such as: ttft:200 tpot:20 e2e:5000."
    )
    seed: int | None = _option(
        None, "Seed of prompts and arrivals; drawn if unset, so that no server knows prompts of an earlier run."
    )
    case: str | None = _option(None, "Name of the rows in the result; MODEL+serve if unset.")

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
        """What is measured, one after another."""
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
        """More limits of goodput, which may follow the first one without the option's name."""
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
        """Of one run. ``available`` is how many a data set or trace has."""
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
