"""A run of ``lossless_fuzz.py``: engine after engine, every request judged against itself alone, everything counted."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lossless_fuzz_compare import Comparison, compare
from lossless_fuzz_driver import FuzzedEngine, Seen, run_alone
from lossless_fuzz_engines import DRAFTERS, MOST_LATE, Drafter, EngineChoice, build_fuzzed, build_plain, draw_engine
from lossless_fuzz_models import Folders
from lossless_fuzz_requests import FuzzRequest, draw_requests
from slipstream.engine.stats import EngineStats
from slipstream.output import RequestOutput

PER_ENGINE = 25


@dataclass(frozen=True)
class Settings:
    """What a run is made of: the same settings make the same run."""

    num_requests: int = 1000
    seed: int = 0
    per_engine: int = PER_ENGINE  # requests of one engine
    drafters: tuple[Drafter, ...] = DRAFTERS
    device: str = "cpu"  # or sim, of all engines but the plain ones; or cuda, of all, with exact
    exact: bool = False  # engines with ``exact``: results are compared to the bit

    @property
    def plain_device(self) -> str:
        """Exact results are those of a kind of device."""
        return self.device if self.exact else "cpu"


@dataclass
class Tally:
    """What a drafter's engines did."""

    engines: list[EngineChoice] = field(default_factory=list)
    seconds: float = 0.0  # of the engines, without the plain runs
    num_requests: int = 0
    num_tokens: int = 0  # that callers got
    num_drafts: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_aborted: int = 0  # requests
    num_different: int = 0  # requests
    num_logprobs: int = 0
    num_rounded: int = 0
    ends: Counter[str] = field(default_factory=Counter)  # continuations by what ended them

    def __iadd__(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def count_engine(self, choice: EngineChoice, stats: EngineStats, seconds: float) -> None:
        self.engines.append(choice)
        self.seconds += seconds
        self.num_drafts += stats.num_draft_tokens
        self.num_accepted += stats.num_accepted_tokens
        self.num_preemptions += stats.num_preemptions
        self.num_cached_tokens += stats.num_cached_tokens

    def count_request(self, output: RequestOutput | None, comparison: Comparison) -> None:
        completions = [] if output is None else output.outputs
        self.num_requests += 1
        self.num_tokens += sum(len(completion.token_ids) for completion in completions)
        self.num_aborted += any(completion.finish_reason == "abort" for completion in completions)
        self.num_different += bool(comparison.differences)
        self.num_logprobs += comparison.num_logprobs
        self.num_rounded += comparison.num_rounded
        for completion in completions:
            is_text = isinstance(completion.stop_reason, str)
            self.ends["stop string" if is_text else str(completion.finish_reason)] += 1


@dataclass(frozen=True)
class Difference:
    request: FuzzRequest
    choice: EngineChoice
    lines: list[str]


@dataclass(frozen=True)
class Judged:
    request: FuzzRequest
    choice: EngineChoice
    found: RequestOutput | None
    plain: RequestOutput | None


@dataclass
class Outcome:
    tallies: dict[Drafter, Tally]
    differences: list[Difference] = field(default_factory=list)
    last: Judged | None = None

    def find_shortcomings(self) -> list[str]:
        """Why the run says less than it should."""
        tallies = self.tallies.values()
        found = [
            f"{drafter.name}: of {tally.num_drafts} draft tokens none was accepted"
            for drafter, tally in self.tallies.items()
            if drafter.method and not tally.num_accepted
        ]
        if not sum(tally.num_preemptions for tally in tallies):
            found.append("no request was preempted")
        if not sum(tally.num_aborted for tally in tallies):
            found.append("no request was aborted")
        return found


class Fuzz:
    """``advance`` is called for each request that has been judged."""

    def __init__(self, settings: Settings, folders: Folders, advance: Callable[[], Any] = lambda: None) -> None:
        self._settings, self._folders, self._advance = settings, folders, advance
        self._device = settings.device, settings.exact
        self._plain: dict[str, FuzzedEngine] = {}  # by the folder of the target
        self._outcome = Outcome({drafter: Tally() for drafter in settings.drafters})

    def run(self, only: int | None = None) -> Outcome:
        """All requests. With ``only`` all of one engine, the one that has this request, which alone is judged."""
        size, total = self._settings.per_engine, self._settings.num_requests
        try:
            for idx in range(-(-total // size)):
                ids = range(idx * size, min(total, (idx + 1) * size))
                if only is None or only in ids:
                    self._run_engine(idx, ids, only)
        finally:
            for engine in self._plain.values():
                engine.close()
        return self._outcome

    def _run_engine(self, idx: int, ids: range, only: int | None) -> None:
        seed, drafters = self._settings.seed, self._settings.drafters
        choice = draw_engine(seed, idx, drafters)
        requests = draw_requests(random.Random(f"requests {seed} {idx}"), ids)
        tally = self._outcome.tallies[choice.drafter]
        engine = FuzzedEngine(build_fuzzed(choice, self._folders, *self._device), choice.seed, MOST_LATE)
        failure, began = "", time.monotonic()
        try:
            engine.run(requests)
        except Exception as error:  # this engine broke, or did not end clean; the others go on
            failure = f"the engine stopped: {type(error).__name__}: {error}"
        finally:
            engine.close()
        tally.count_engine(choice, engine.core.stats, time.monotonic() - began)
        for request in requests:
            if only is None or request.idx == only:
                seen = engine.seen.get(request.idx)
                was_lost = seen is None or not seen.is_finished
                self._judge(request, choice, seen, failure if was_lost or request is requests[-1] else "")
            self._advance()

    def _judge(self, request: FuzzRequest, choice: EngineChoice, seen: Seen | None, failure: str) -> None:
        comparison, alone = Comparison([failure] if failure else []), None
        if seen is not None:
            plain = self._plain_engine(choice.drafter)
            alone = run_alone(plain, seen)
            if not failure:
                comparison = compare(seen, alone, plain.client.tokenizer, self._settings.exact)
        found, reference = (None if one is None else one.last for one in (seen, alone))
        self._outcome.tallies[choice.drafter].count_request(found, comparison)
        self._outcome.last = Judged(request, choice, found, reference)
        if comparison.differences:
            self._outcome.differences.append(Difference(request, choice, comparison.differences))

    def _plain_engine(self, drafter: Drafter) -> FuzzedEngine:
        if drafter.plain not in self._plain:
            where = self._settings.plain_device, self._settings.exact
            self._plain[drafter.plain] = FuzzedEngine(build_plain(drafter.plain, self._folders, *where))
        return self._plain[drafter.plain]
