"""One world a seed: an engine on the simulated device, requests that come and go, and the truth beside it.

The real scheduler, runner, graphs and sampler run; only the network is a hash. A seed draws the machine (pages, rows,
chunks, steps in flight, graphs, pace), the requests, and which kinds of event happen at all: a fault that needs an
abort and no preemption is found sooner where there are no preemptions.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from slipstream.attention.backend import AttentionBackend
from slipstream.attention.choice import open_caches
from slipstream.config import GRAPH_MODES, DraftModel, EngineConfig, EngineOptions
from slipstream.device.sim import SimDevice
from slipstream.engine.build import decide_draft_length
from slipstream.engine.core import EngineCore
from slipstream.engine.resolve import resolve
from slipstream.kernels.request_rows import RowState
from slipstream.output import TokenUpdate
from slipstream.plan import Composition, RowStatus, ScheduledRequest, StepPlan, StepResult
from slipstream.pooling import KIND_NAMES, PoolingParams
from slipstream.request import Request
from slipstream.runner.runner import Runner
from slipstream.sampling_params import SamplingParams
from slipstream.scheduler.draft_length import FixedLength, Lengths
from slipstream.scheduler.scheduler import Scheduler
from slipstream.speculate.draft_model import DraftModelSpeculator
from slipstream.speculate.eagle import EagleSpeculator
from slipstream.speculate.ngram import NgramSpeculator
from slipstream.speculate.options import read_speculation
from slipstream.speculate.speculator import NoSpeculator, Speculator
from tests.sim.hash_head import HashHead, HeadShape
from tests.sim.hash_model import MODEL_CONFIG, NUM_LAYERS, RECURRENT_CONFIG, VOCAB_SIZE, HashBackend, HashModel
from tests.sim.oracle import (
    expected_continuation,
    expected_guesses,
    expected_output,
    expected_prompt_choices,
    expected_vector,
    num_leading,
)

EVENTS = (
    "aborts",
    "draft_limits",
    "draft_vocabulary",
    "drafts",
    "few_pages",
    "few_tokens",
    "follow_ups",
    "graphs",
    "late_arrivals",
    "logprobs",
    "long_stop_lists",
    "min_tokens",
    "noise",
    "priorities",
    "prompt_logprobs",
    "shared_prefixes",
    "stop_ids",
    "prefix_caching",
)
POOLED = "pooled"  # drawn apart from the others, so that they are what they were before there was this one


@dataclass
class Job:
    """A request with its fate."""

    request: Request
    arrives_at: int
    aborts_at: int | None
    expected: list[int]
    reason: str
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


GAP_EVENTS = {"draft_limits", "draft_vocabulary", "follow_ups", "graphs", "noise", "prefix_caching", "shared_prefixes"}


class RandomLength(FixedLength):
    """Whatever a step checks and makes, the tokens must be right: any lengths, drawn anew every few steps."""

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        self._choices, self._random = lengths, random.Random(seed)
        self._draw()

    def _draw(self) -> None:
        # Often none are made, and what is made is mostly checked: what the drafter makes of a gap must be seen.
        rng, choices = self._random, self._choices
        make = 0 if rng.random() < 0.35 else rng.choice(choices)
        self._lengths = Lengths(max(choices) if rng.random() < 0.6 else rng.choice(choices), make)

    def launched(self, composition: Composition) -> None:
        if self._random.random() < 0.4:
            self._draw()


@dataclass
class Drafted:
    """What a drafter can know of a request, from the steps that were collected."""

    num_computed: int
    num_tokens: int
    start: int  # of its own keys, without a gap
    end: int
    num_proposed: int = 0  # by the newest step
    num_before: int = 0  # by the one before: those that the newest step could check
    start_before: int = 0

    def take(
        self, scheduled: ScheduledRequest, num_new: int, plan: StepPlan, goes_over_all: bool, follows: bool
    ) -> None:
        """Another step is collected."""
        first, num_proposed = self.num_computed, plan.composition.num_next_drafts
        self.num_tokens += num_new
        self.num_computed = self.num_tokens - 1 if num_new else first + scheduled.num_tokens - scheduled.num_drafts
        self.num_before, self.start_before, self.num_proposed = self.num_proposed, self.start, num_proposed
        if num_proposed or follows:
            begins = first if goes_over_all else self.num_computed - 1 - plan.composition.num_caught_up
            if first > self.end and begins > self.end:
                self.start = begins
            self.end = self.num_computed


@dataclass
class World:
    seed: int
    overrides: Mapping[str, Any] = field(default_factory=dict)  # engine options that are not drawn
    events: frozenset[str] = frozenset()  # drawn if empty
    make_backend: Callable[[EngineConfig, SimDevice], AttentionBackend] = lambda _config, _device: HashBackend()
    is_recurrent: bool | None = None  # the model keeps states beside keys; None: drawn
    is_alike: bool | None = None  # all prompts begin as the first does, which comes alone; None: drawn
    max_turns: int = 1500  # of the loop, before it counts as endless
    trace: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_launched: int = 0  # by those steps
    num_preemptions: int = 0
    num_vectors: int = 0
    num_shared: int = 0  # steps of requests of both kinds
    num_cascades: int = 0  # steps that were to read common pages once

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        # Of the step just collected: each request's share, and whether it is the first since the request moved in.
        self._collected: dict[str, tuple[ScheduledRequest, bool]] = {}
        self._generations: dict[str, int] = {}
        self._drafted: dict[str, Drafted] = {}
        self._backends: list[AttentionBackend] = []  # the target's, and the drafter's if it has one
        drawn = frozenset(event for event in EVENTS if self._random.random() < 0.6)
        # In every fifth world short prompts are followed by long answers, with a drafter that keeps keys of its own and
        # lengths that are drawn: elsewhere there are few gaps in its cache, for it is shown all prompts.
        self.is_for_gaps = not self.events and not self.overrides and self.seed % 5 == 1
        # In half of those a head looks on in recorded steps: elsewhere it hardly ever takes notes.
        self.is_for_notes = self.is_for_gaps and self.seed % 10 == 1
        if self.is_for_gaps:
            drawn = (drawn & GAP_EVENTS) | {"drafts"}
        if self.is_for_notes:
            drawn |= {"graphs"}
        # In every tenth world all of a batch mostly begin with common pages: elsewhere there are few such steps.
        if self.is_alike is None:
            self.is_alike = not self.events and not self.overrides and self.seed % 10 == 4
        if self.is_alike:
            drawn |= {"prefix_caching"}
        if self.is_recurrent is None:
            self.is_recurrent = not (self.events or self.overrides or self.is_alike) and self.seed % 6 == 2
        self._pooled_random = random.Random(f"pooled {self.seed}")
        if self._pooled_random.random() < 0.5:
            drawn |= {POOLED}
        self.events = self.events or drawn
        self.options = replace(self._draw_options(), **self.overrides)
        self.head = self._draw_head()
        self.jobs = self._draw_jobs()
        if POOLED in self.events:
            self.jobs = [self._pooled(job) if self._pooled_random.random() < 0.4 else job for job in self.jobs]
        # Most worlds have all their graphs from the start, some a few or none; they record more when idle.
        self.num_recorded = {6: self._random.randint(0, 40), 7: 0}.get(self.seed % 8, 1000)

    # --- what the seed draws ----------------------------------------------------------------------

    def _draw_options(self) -> EngineOptions:
        rng = self._random
        max_num_seqs = rng.randint(1, 6)
        if self.is_alike:
            max_num_seqs = max(2, max_num_seqs)
        speculative = self._draw_speculation()
        if speculative and self.seed % 5 < 3:  # not drawn, so that a world is otherwise what it was before they adapted
            speculative["adaptive"] = True
        num_drafts = speculative["num_speculative_tokens"] if speculative else 0
        budget = max(max_num_seqs * (1 + num_drafts), rng.choice([1, 2, 7, 16, 24, 48]))
        max_model_len = rng.choice([24, 40, 64])
        block_size = rng.choice([1, 2, 4, 8, 4 if self.is_alike else 16])
        enough = -(-max_model_len // block_size)
        num_pages = enough + (rng.randint(0, enough) if "few_pages" in self.events else enough * max_num_seqs)
        sizes = sorted({*rng.sample(range(1, 13), 2), *rng.sample(range(1, 49), 2)})
        mode = rng.choice(GRAPH_MODES) if "graphs" in self.events else "none"
        if self.is_for_notes:
            mode = "full"
        apart = random.Random(~self.seed)  # so that a world is otherwise what it was before there was what it draws
        return EngineOptions(
            device="sim",
            dtype="float64",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=rng.choice([1, 3, 8, 64]),
            mixed_prefill_tokens=apart.choice([None, 1, 5, 16]),
            attention_backend="triton",  # in name: of those that run here the one with a cascade
            cascade="always" if self.is_alike else apart.choice(["always", "always", "never"]),
            block_size=block_size,
            num_gpu_blocks_override=num_pages,
            steps_in_flight=rng.randint(1, 4),
            cudagraph_mode=mode,
            cudagraph_capture_sizes=tuple(sizes),
            enable_prefix_caching="prefix_caching" in self.events,
            speculative_config=speculative,
        )

    def _draw_speculation(self) -> dict[str, Any] | None:
        rng = self._random
        if "drafts" not in self.events:
            return None
        drawn = {
            "num_speculative_tokens": rng.choice([1, 2, 3, 5, 5, 16]),
            "verify": rng.choice(["match", "rejection"]),
        }
        if rng.random() < 0.3 and not self.is_for_gaps:
            least = rng.randint(1, 3)
            return drawn | {
                "method": "ngram",
                "prompt_lookup_min": least,
                "prompt_lookup_max": least + rng.randint(0, 2),
            }
        method = rng.choice(["eagle", "eagle3"] if self.is_for_notes else ["draft_model", "eagle", "eagle3", "mtp"])
        return drawn | {"method": method} | ({} if method == "mtp" else {"model": "the hash"})

    def _draw_head(self) -> HeadShape:
        """What the head is like, in worlds where one drafts."""
        rng, method = self._random, (self.options.speculative_config or {}).get("method")
        draft_ids = None
        if "draft_vocabulary" in self.events:
            draft_ids = [token_id for token_id in range(VOCAB_SIZE) if rng.random() < 0.7] or [0]
            if rng.random() < 0.5:
                rng.shuffle(draft_ids)
        return HeadShape((1, 2) if method == "eagle3" else (), rng.randint(1, 3) if method == "mtp" else 1, draft_ids)

    def _draw_jobs(self) -> list[Job]:
        rng, limit = self._random, self.options.max_model_len
        assert limit is not None
        bases = [[rng.randrange(VOCAB_SIZE) for _ in range(limit)] for _ in range(2)]
        if self.is_alike:
            return self._draw_alike(bases[0])
        jobs = []
        for i in range(rng.randint(4, 14)):
            prompt_len = rng.randint(1, 4 if self.is_for_gaps else rng.choice([4, limit - 2, limit - 1]))
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(prompt_len)]
            if "shared_prefixes" in self.events and rng.random() < 0.7:
                shared = rng.randint(1, prompt_len)
                if rng.random() < 0.5:  # where a page ends
                    shared = max(1, shared - shared % self.options.block_size)
                prompt = rng.choice(bases)[:shared] + prompt[shared:]
            fewest = (limit - prompt_len) // 2 if self.is_for_gaps else 1
            jobs.append(self._draw_job(f"r{i}", prompt, rng.randint(fewest, limit - prompt_len)))
            if "follow_ups" in self.events and rng.random() < 0.5:
                jobs += self._draw_follow_up(jobs[-1])
        return jobs

    def _draw_alike(self, base: list[int]) -> list[Job]:
        rng, limit = self._random, len(base)
        jobs = []
        for i in range(rng.randint(6, 14)):
            own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
            prompt = base[: rng.randint(limit // 4, limit * 2 // 3)] + own
            jobs.append(self._draw_job(f"r{i}", prompt, rng.randint(1, limit - len(prompt))))
            jobs[-1].arrives_at = rng.randint(8, 40) if i else 0
        return jobs

    def _pooled(self, job: Job) -> Job:
        """The same prompt for a vector in place of tokens; now and then one that fills the context."""
        rng, prompt = self._pooled_random, job.request.prompt_token_ids
        limit = self.options.max_model_len
        assert limit is not None
        if rng.random() < 0.2:
            prompt += tuple(rng.randrange(VOCAB_SIZE) for _ in range(limit - len(prompt)))
        request = replace(
            job.request,
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0, seed=0).with_defaults(SamplingParams()),
            stop_token_ids=(),
            max_total_tokens=len(prompt),
            pooling=PoolingParams(rng.choice(KIND_NAMES), normalize=False),
        )
        return replace(job, request=request, expected=[], reason="length")

    def _draw_follow_up(self, job: Job) -> list[Job]:
        """A conversation goes on: the prompt is another's with its answer, so the pages of both are found again."""
        rng, limit = self._random, self.options.max_model_len
        assert limit is not None
        said = [*job.request.prompt_token_ids, *job.expected, rng.randrange(VOCAB_SIZE)]
        if len(said) >= limit:
            return []
        later = self._draw_job(f"{job.request.request_id}+", said, rng.randint(1, limit - len(said)))
        later.arrives_at = job.arrives_at + rng.randint(10, 60)
        later.aborts_at = None
        return [later]

    def _draw_job(self, request_id: str, prompt: list[int], max_tokens: int) -> Job:
        rng, events = self._random, self.events
        stop_ids: list[int] = []
        if "stop_ids" in events and rng.random() < 0.5:
            stop_ids = rng.sample(range(VOCAB_SIZE), 24 if "long_stop_lists" in events else rng.randint(1, 4))
        params: dict[str, Any] = {"temperature": 0.0, "seed": rng.randrange(2**32)}
        if "noise" in events and rng.random() < 0.4:
            params["temperature"] = rng.choice([0.5, 1.0, 7.0])
        # The device holds back as many stop ids as it knows; a longer list is the host's business.
        if "min_tokens" in events and len(stop_ids) <= 16 and rng.random() < 0.4:
            params["min_tokens"] = rng.randint(1, max_tokens)
        if "logprobs" in events and rng.random() < 0.3:
            params["logprobs"] = 2
        if "prompt_logprobs" in events and rng.random() < 0.3:
            params["prompt_logprobs"] = 1
        if "draft_limits" in events:
            params["speculate"] = rng.random() < 0.7
            params["max_k"] = rng.choice([None, 0, 1, 2, 4])
        request = Request(
            request_id,
            tuple(prompt),
            SamplingParams(**params).with_defaults(SamplingParams()),
            tuple(stop_ids),
            len(prompt) + max_tokens,
            priority=rng.randint(-1, 1) if "priorities" in events else 0,
        )
        arrives_at = rng.randint(0, 60) if "late_arrivals" in events else 0
        aborts_at = arrives_at + rng.randint(0, 40) if "aborts" in events and rng.random() < 0.3 else None
        return Job(request, arrives_at, aborts_at, *expected_output(request, self.num_used, bool(self.is_recurrent)))

    @property
    def num_used(self) -> int:
        """Of how many tokens the model's are: with few of them they repeat themselves."""
        return 3 if "few_tokens" in self.events else VOCAB_SIZE

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> None:
        with _no_cycles():
            self.device = SimDevice(self.seed)
            config = self.resolve()
            self._note(f"seed {self.seed}: {self.options}; {self.head}; events {sorted(self.events)}")
            self.core_config, self.core = config, self._build(config)
            for _ in range(self.num_recorded):
                if not self.core.use_idle_time():
                    break
            num_launched = self.device.num_launched
            waiting, now = sorted(self.jobs, key=lambda job: job.arrives_at), 0
            while waiting or self.core.has_work:
                while waiting and waiting[0].arrives_at <= now:
                    self._note(f"{now}: {waiting[0].request.request_id} arrives")
                    self.core.add(waiting.pop(0).request)
                for job in self.jobs:
                    if job.aborts_at == now and not job.finished and job not in waiting:
                        self._note(f"{now}: {job.request.request_id} is aborted")
                        job.finished = self.core.finish(job.request.request_id)
                for update in self.core.step():
                    self._check(update, now)
                if not self.core.has_work:
                    self._check_idle()
                    self.core.use_idle_time()
                now += 1
                assert now < self.max_turns, "the engine does not come to an end"
            self._check_cascades()
            self.num_launched = self.device.num_launched - num_launched
            self.num_steps, self.num_preemptions = self.core.stats.num_steps, self.core.stats.num_preemptions
            for job in self.jobs:
                assert job.finished, f"{job.request.request_id} never finished"

    def resolve(self) -> EngineConfig:
        speculative = read_speculation(self.options)
        draft = None
        if speculative is not None and speculative.method != "ngram":
            draft = DraftModel(MODEL_CONFIG)
            if speculative.needs.looks_ahead:
                draft = DraftModel(self.head.config, num_modules=self.head.num_modules)
        model = RECURRENT_CONFIG if self.is_recurrent else MODEL_CONFIG
        return resolve(self.options, self.device.hardware("float64"), model, draft=draft)

    def _build(self, config: EngineConfig) -> EngineCore:
        device, max_len = self.device, config.scheduler.max_model_len
        with device.sync_guard.allow("build"):
            model = HashModel(max_len, device.torch_device, self.num_used, recurrent=bool(self.is_recurrent))
            backend = self.make_backend(config, device)
            caches = open_caches(config, config.model, device, attention=backend)
            self._backends = [backend]

            def make_speculator(rows: RowState) -> Speculator:
                if config.speculative is None:
                    return NoSpeculator()
                if config.speculative.method == "ngram":
                    return NgramSpeculator(config.speculative, rows)
                own_backend = self.make_backend(config, device)
                self._backends.append(own_backend)
                assert config.draft_model is not None
                own = open_caches(config, config.draft_model, device, attention=own_backend)
                if config.speculative.needs.looks_ahead:
                    head = HashHead(max_len, device.torch_device, self.num_used, self.head)
                    return EagleSpeculator(config, device, head, own, rows)
                drafter = HashModel(max_len, device.torch_device, self.num_used, guesses=True)
                return DraftModelSpeculator(config, device, drafter, own, rows)

            draft_length, on_cost = decide_draft_length(config, caches.caps)
            if config.speculative is not None and config.speculative.adaptive and self.seed % 5 < 2:
                draft_length = RandomLength(config.speculative.lengths, self.seed)
            runner = Runner(config, device, model, caches, make_speculator, on_cost)
        core = EngineCore(Scheduler(config.scheduler, config.cache, draft_length), runner, config.steps_in_flight)
        collect = core.scheduler.collect
        goes_over_all = config.speculative is not None and config.speculative.needs.looks_ahead
        follows = config.scheduler.needs.follows

        pooled = {job.request.request_id for job in self.jobs if job.request.pooling is not None}

        def collect_and_keep(result: StepResult) -> list[TokenUpdate]:
            self._collected = {
                r.request_id: (r, self._generations.get(r.request_id) != r.generation) for r in result.plan.requests
            }
            self._generations |= {r.request_id: r.generation for r in result.plan.requests}
            self.num_cascades += result.plan.composition.num_common_pages > 0
            self.num_shared += len({request_id in pooled for request_id in result.plan.composition.request_ids}) == 2
            for init in result.plan.row_inits:
                lengths = (init.num_computed, len(init.token_ids), init.draft_start, init.num_computed)
                self._drafted[init.request.request_id] = Drafted(*lengths)
            for r, new in zip(result.plan.requests, result.token_ids, strict=True):
                self._drafted[r.request_id].take(r, len(new), result.plan, goes_over_all, follows)
            return collect(result)

        core.scheduler.collect = collect_and_keep  # type: ignore[method-assign]
        return core

    def _check(self, update: TokenUpdate, now: int) -> None:
        job = next(job for job in self.jobs if job.request.request_id == update.request_id)
        self._note(f"{now}: {update.request_id} gets {update.token_ids} {update.finish_reason or ''}")
        assert not job.finished, f"{update.request_id}: an update after its end"
        if job.request.pooling is not None:
            self._check_vector(job, update)
        if update.token_ids and update.finish_reason != "error":
            self._check_drafts(job, update)
        job.tokens += update.token_ids
        so_far = job.expected[: len(job.tokens)]
        assert job.tokens == so_far, f"{update.request_id}: tokens {job.tokens}, expected {so_far}"
        if job.request.params.logprobs is not None and update.token_ids:
            told = [row.token_ids[0] for row in update.logprobs or ()]
            assert told == update.token_ids, f"{update.request_id}: log probabilities of {told}"
        if update.prompt_logprobs is not None:
            first, rows = update.prompt_logprobs
            all_choices = expected_prompt_choices(job.request.prompt_token_ids, self.num_used, bool(self.is_recurrent))
            choices = all_choices[first - 1 : first - 1 + len(rows)]
            given = list(job.request.prompt_token_ids[first : first + len(rows)])
            assert [row.token_ids[0] for row in rows] == given, f"{update.request_id}: prompt tokens"
            assert [row.token_ids[1] for row in rows] == choices, f"{update.request_id}: prompt choices"
        if update.finish_reason is not None:
            job.finished = True
            assert job.tokens == job.expected, (
                f"{update.request_id}: {len(job.expected) - len(job.tokens)} tokens missing"
            )
            assert update.finish_reason == job.reason, f"{update.request_id}: {update.finish_reason}, not {job.reason}"

    def _check_vector(self, job: Job, update: TokenUpdate) -> None:
        """It comes with the request's end, whatever the chunks, and is of its own text alone."""
        assert not update.token_ids and update.vector is not None, f"{update.request_id}: no vector"
        assert job.request.pooling is not None
        found = update.vector.finish(job.request.pooling)
        expected = np.array(expected_vector(job.request, bool(self.is_recurrent)))
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0, err_msg=f"{update.request_id}: vector")
        self.num_vectors += 1

    def _check_drafts(self, job: Job, update: TokenUpdate) -> None:
        """As many drafts as there should be, and as many of them accepted as a right drafter has right."""
        request, speculative = job.request, self.core_config.speculative
        scheduled, is_first = self._collected[update.request_id]
        if speculative is None:
            assert (update.num_drafts, update.num_accepted, scheduled.num_drafts) == (0, 0, 0)
            return
        most = request.num_drafts(speculative.num_drafts)
        known, following = [*request.prompt_token_ids, *job.tokens], job.expected[len(job.tokens) :]
        drafted = self._drafted[update.request_id]
        if most and not is_first and scheduled.num_tokens - scheduled.num_drafts == 1 and not speculative.adaptive:
            assert scheduled.num_drafts == speculative.num_drafts, f"{update.request_id}: no draft slots"
        room = min(most, request.max_total_tokens - len(known) - 1, drafted.num_before, scheduled.num_drafts)
        if speculative.method == "ngram":
            drafts = expected_continuation(known, room, *speculative.settings.values())
        else:
            draft_ids, num_modules, start = None, 1, drafted.start_before
            if speculative.needs.looks_ahead:  # which tell all of what was before
                draft_ids, num_modules, start = (
                    self.head.draft_ids,
                    min(self.head.num_modules, speculative.num_drafts),
                    0,
                )
            drafts = expected_guesses(known, following, self.num_used, draft_ids, num_modules, start)[:room]
            drafts += [-1] * (room - len(drafts))  # after the request's end, where drafts are arbitrary
        accepted = num_leading(drafts, following)
        expected = (len(drafts), accepted, min(accepted + 1, len(following)))
        found = (update.num_drafts, update.num_accepted, len(update.token_ids))
        assert found == expected, f"{update.request_id}: drafts, accepted, tokens {found}, expected {expected}"

    def _check_cascades(self) -> None:
        """What is to be read once is, in no recording, and never by a drafter."""
        counts = [getattr(backend, "num_cascades", 0) for backend in self._backends]
        expected = [NUM_LAYERS * self.num_cascades, 0][: len(counts)]
        assert counts == expected, f"layers that read common pages once: {counts}, expected {expected}"

    def _check_idle(self) -> None:
        """Nothing runs: every page, row and slot is free, and memory that must not be written was not."""
        self.core.scheduler.check_idle()
        runner, peek = self.core.runner, self.device.peek
        rows = runner.rows
        for ring in (rows._staged._ring, runner.head.generate.outputs._ring, runner.head.ring):
            assert all(slot.event.query() for slot in ring.slots), "a ring slot is still in use"
        assert peek(rows.status)[rows.scratch_row] == RowStatus.INERT, "the scratch row runs"
        assert peek(rows.num_computed)[rows.scratch_row] == 0, "the scratch row advanced"
        own = getattr(runner.speculator, "caches", None)
        for groups in (runner.caches, *([own] if own is not None else [])):
            for memory in groups.paged_memory():
                assert not peek(memory)[0].any(), "the null page was written"
            for memory in groups.row_memory():
                assert not peek(memory)[rows.scratch_row].any(), "padding has a state"

    def _note(self, text: str) -> None:
        self.trace.append(text)


@contextmanager
def _no_cycles() -> Iterator[None]:
    """Memory is freed where references end, never at a moment that the collector chose."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_seed(seed: int, *, is_recurrent: bool | None = None, **overrides: Any) -> World:
    torch.set_num_threads(1)
    world = World(seed, overrides, is_recurrent=is_recurrent)
    world.run()
    return world
