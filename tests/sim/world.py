"""One world a seed: an engine on the simulated device, requests that come and go, and the truth beside it.

The real scheduler, runner, graphs and sampler run; only the network is a hash. A seed draws the machine (pages, rows,
chunks, steps in flight, graphs, pace), the requests, and which kinds of event happen at all: a fault that needs an
abort and no preemption is found sooner where there are no preemptions.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from slipstream.attention import mla, sparse_mla
from slipstream.attention.backend import AttentionBackend
from slipstream.attention.choice import open_caches
from slipstream.attention.groups import CacheGroups
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import GRAPH_MODES, DraftModel, EngineConfig, EngineOptions, ModelConfig
from slipstream.device.sim import SimDevice
from slipstream.encoder_input import EncoderInput
from slipstream.engine.build import decide_draft_length
from slipstream.engine.core import EngineCore
from slipstream.engine.resolve import resolve
from slipstream.engine.step_clock import StepClock
from slipstream.grammar.constraints import Constraints, MaskLimits
from slipstream.kernels.attention import latent_parts
from slipstream.kernels.request_rows import RowState
from slipstream.output import TokenUpdate
from slipstream.plan import Composition, RowStatus, ScheduledRequest, StepPlan, StepResult
from slipstream.pooling import KIND_NAMES, PoolingParams
from slipstream.request import Request
from slipstream.runner.program import Model
from slipstream.runner.runner import Runner
from slipstream.sampling_params import SamplingParams
from slipstream.scheduler.draft_length import FixedLength, Lengths
from slipstream.scheduler.scheduler import Scheduler
from slipstream.speculate.dflash import DFlashSpeculator
from slipstream.speculate.draft_model import DraftModelSpeculator
from slipstream.speculate.eagle import EagleSpeculator
from slipstream.speculate.early_exit import EarlyExitSpeculator
from slipstream.speculate.ngram import NgramSpeculator
from slipstream.speculate.options import read_speculation
from slipstream.speculate.speculator import NoSpeculator, Speculator
from slipstream.speculative_config import MAX_DRAFTS
from tests.sim import toy_grammar
from tests.sim.hash_block import HashBlockHead
from tests.sim.hash_block import config_of as block_config
from tests.sim.hash_encoder import ENCODER_CONFIG, HashEncoder, encoded
from tests.sim.hash_head import HashHead, HeadShape
from tests.sim.hash_latent import LATENT_CONFIG, SPARSE_CONFIG, TOP_K
from tests.sim.hash_model import MODEL_CONFIG, NUM_LAYERS, RECURRENT_CONFIG, VOCAB_SIZE, HashBackend, HashModel
from tests.sim.hash_source_encoder import (
    CROSS_SPEC,
    FRAMES_PER_ENTRY,
    MAX_ENTRIES,
    NUM_BINS,
    SOURCE_CONFIG,
    HashSourceEncoder,
)
from tests.sim.oracle import (
    OracleKind,
    expected_certain,
    expected_continuation,
    expected_guesses,
    expected_output,
    expected_prompt_choices,
    expected_vector,
    num_leading,
    pool_states,
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
CROSS_CONFIG = replace(
    MODEL_CONFIG,
    layer_caches=(*[MODEL_CONFIG.keys_and_values] * NUM_LAYERS, *[CROSS_SPEC] * NUM_LAYERS),
    source_encoder=SOURCE_CONFIG,
)
CONSTRAINED = "constrained"  # drawn apart as well
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


class DrawnClock(StepClock):
    """Steps take any time at all, or as long as a machine's would: chunks of prompts are cut anywhere."""

    def __init__(self, seed: int) -> None:
        super().__init__(1)
        self._random = random.Random(f"clock {seed}")
        self._usual_s = self._random.choice([1e-4, 1e-2, 1.0])

    def collected(self, step_id: int, wait_s: float) -> float | None:
        del self._begun[step_id]
        rng = self._random
        return None if rng.random() < 0.2 else self._usual_s * rng.choice([0.5, 1.0, 1.0, 1.1, 40.0])


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
    is_latent: bool | None = None  # the model's layers, and its drafter's, keep latents; None: drawn
    is_sparse: bool | None = None  # those layers choose which latents they attend to; None: drawn
    is_encoder: bool | None = None  # the model only encodes, so that all requests are pooled; None: drawn
    is_split: bool | None = None  # steps without a graph run in halves, cut anywhere; None: drawn
    is_block: bool | None = None  # a head drafts blocks; None: drawn
    is_cross: bool | None = None  # the model, and its drafter, have an encoder; None: drawn
    is_constrained: bool | None = None  # requests have grammars; None: drawn
    is_alike: bool | None = None  # all prompts begin as the first does, which comes alone; None: drawn
    max_turns: int = 1500  # of the loop, before it counts as endless
    trace: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_launched: int = 0  # by those steps
    num_preemptions: int = 0
    num_vectors: int = 0
    num_shared: int = 0  # steps of requests of both kinds
    num_splits: int = 0  # steps that were cut, if that was possible there
    num_cascades: int = 0  # steps that were to read common pages once

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        # Of the step just collected: each request's share, and whether it is the first since the request moved in.
        self._collected: dict[str, tuple[ScheduledRequest, bool]] = {}
        self._generations: dict[str, int] = {}
        self._bounds: dict[str, int] = {}  # computed tokens of each request, its drafts in flight counted as accepted
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
            # Where no head looks on, pages with gaps are found again by the next request of a conversation.
            drawn |= {"graphs"} if self.is_for_notes else {"prefix_caching", "follow_ups"}
        # In every tenth world all of a batch mostly begin with common pages: elsewhere there are few such steps.
        if self.is_alike is None:
            is_free = not (self.events or self.overrides or self.is_cross)
            self.is_alike = is_free and self.seed % 10 == 4
        if self.is_alike:
            drawn |= {"prefix_caching"}
        if self.is_recurrent is None:
            is_free = not (self.events or self.overrides or self.is_alike or self.is_latent or self.is_sparse)
            self.is_recurrent = is_free and not self.is_cross and self.seed % 6 == 2
        if self.is_latent is None:
            is_free = not (self.events or self.overrides or self.is_alike or self.is_recurrent or self.is_cross)
            self.is_latent = bool(self.is_sparse) or (is_free and self.seed % 7 == 3)
        if self.is_sparse is None:
            self.is_sparse = self.is_latent and self.seed % 2 == 1
        if self.is_encoder is None:
            is_free = not (self.events or self.overrides or self.is_alike or self.is_recurrent or self.is_latent)
            self.is_encoder = is_free and not self.is_cross and self.seed % 8 == 5
        if self.is_encoder:
            drawn -= {"drafts"}
        self._split_random = random.Random(f"split {self.seed}")
        if self.is_split is None:
            self.is_split = self._split_random.random() < 0.5
        if self.is_block:
            drawn |= {"drafts"}
        elif self.is_block is None:
            is_free = not (self.events or self.overrides or self.is_for_gaps or self.is_sparse or self.is_encoder)
            self.is_block = is_free and not self.is_cross and self.seed % 8 == 2
        if self.is_cross is None:
            has_kind = self.is_recurrent or self.is_latent or self.is_encoder or self.is_block
            is_free = not (self.events or self.overrides or self.is_alike or has_kind)
            self.is_cross = is_free and self.seed % 8 in (1, 3)
        self._encoder_random = random.Random(f"encoder {self.seed}")
        self._encoder_inputs = [self._draw_encoder_input() for _ in range(4)]  # few, so that requests share some
        self._pooled_random = random.Random(f"pooled {self.seed}")
        if self._pooled_random.random() < 0.5:
            drawn |= {POOLED}
        self._grammar_random = random.Random(f"grammar {self.seed}")
        if self.is_constrained or (self.is_constrained is None and self._grammar_random.random() < 0.3):
            drawn |= {CONSTRAINED}
        self.events = self.events or drawn
        self.options = replace(self._draw_options(), **self.overrides)
        if self.is_latent or self.is_cross:
            self.options = replace(self.options, cascade="never")
        if self.is_encoder:
            self.options = replace(self.options, **self._draw_encoder_options())
        self.head = self._draw_head()
        self.jobs = self._draw_jobs()
        if POOLED in self.events:
            self.jobs = [self._pooled(job) if self._pooled_random.random() < 0.4 else job for job in self.jobs]
        if self.is_encoder:
            self.jobs = [job if job.request.pooling is not None else self._pooled(job) for job in self.jobs]
        # Most worlds have all their graphs from the start, some a few or none; they record more when idle.
        self.num_recorded = {6: self._random.randint(0, 40), 7: 0}.get(self.seed % 8, 1000)

    # --- what the seed draws ----------------------------------------------------------------------

    def _draw_options(self) -> EngineOptions:
        rng = self._random
        max_num_seqs = rng.randint(1, 6)
        if self.is_alike:
            max_num_seqs = max(2, max_num_seqs)
        speculative = self._draw_speculation()
        if speculative and self.is_block and not self.is_sparse:
            kept = {key: speculative[key] for key in ("num_speculative_tokens", "verify")}
            speculative = {**kept, "method": "dflash", "model": "the hash"}
        if speculative and self.seed % 5 < 3:  # not drawn, so that a world is otherwise what it was before they adapted
            speculative["adaptive"] = True
        num_drafts = speculative["num_speculative_tokens"] if speculative else 0
        budget = max(max_num_seqs * (1 + num_drafts), rng.choice([1, 2, 7, 16, 24, 48]))
        max_model_len = rng.choice([24, 40, 64])
        block_size = rng.choice([1, 2, 4, 8, 4 if self.is_alike else 16])
        enough = -(-max_model_len // block_size) + (-(-MAX_ENTRIES // block_size) if self.is_cross else 0)
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
            **self._draw_limit(),
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

    def _draw_limit(self) -> dict[str, Any]:
        """Of the time of steps with prompts, whose costs the world's own clock draws."""
        rng = random.Random(f"limit {self.seed}")
        if rng.random() < 0.3:
            return {"prefer": "throughput"}
        return {"prefer": "balance", "max_itl_ms": rng.choice([None, 1.0, 10.0, 30.0, 1000.0])}

    def _draw_encoder_options(self) -> dict[str, Any]:
        """A step has room for any text, and now and then for several."""
        limit = self.options.max_model_len
        assert limit is not None
        budget = limit + self._pooled_random.choice([0, 5, limit])
        return {
            "max_num_batched_tokens": budget,
            "long_prefill_token_threshold": None,
            "num_gpu_blocks_override": None,
            "speculative_config": None,
            "cascade": "never",
        }

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
        methods = ["draft_model", "eagle", "eagle3", "mtp"]
        if self.is_for_gaps:  # heads follow, so a draft model alone leaves gaps
            methods = ["eagle", "eagle3"] if self.is_for_notes else ["draft_model"] * 3 + ["mtp"]
        method = rng.choice(methods)
        if self.is_sparse or self.is_cross:  # a head of the hash model adds up all that the target has seen
            method = "draft_model"
        if method == "draft_model" and not (self.is_for_gaps or self.is_recurrent) and self._draws_early_exit():
            return drawn | {"method": "early_exit", "exit_layer": 1}
        return drawn | {"method": method} | ({} if method == "mtp" else {"model": "the hash"})

    def _draws_early_exit(self) -> bool:
        return random.Random(f"early exit {self.seed}").random() < 0.4

    def _draw_encoder_input(self) -> EncoderInput:
        rng = self._encoder_random
        shape = (NUM_BINS, FRAMES_PER_ENTRY * rng.randint(1, MAX_ENTRIES))
        values = [float(rng.randrange(1 << 24)) for _ in range(shape[0] * shape[1])]
        return EncoderInput(np.array(values, dtype=np.float32).reshape(shape))

    def _draw_head(self) -> HeadShape:
        """What the head is like, in worlds where one drafts."""
        rng, method = self._random, (self.options.speculative_config or {}).get("method")
        draft_ids = None
        if "draft_vocabulary" in self.events:
            draft_ids = [token_id for token_id in range(VOCAB_SIZE) if rng.random() < 0.7] or [0]
            if rng.random() < 0.5:
                rng.shuffle(draft_ids)
        num_modules = rng.randint(1, 3) if method == "mtp" else 1
        # A head of EAGLE-3 keeps keys and values beside any target.
        is_latent = bool(self.is_latent) and method != "eagle3"
        return HeadShape((1, 2) if method == "eagle3" else (), num_modules, draft_ids, is_latent)

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
        if self.is_cross:
            encoder = self._encoder_random.choice(self._encoder_inputs)
            num_entries = encoder.features.shape[1] // FRAMES_PER_ENTRY
            request = replace(request, encoder=encoder, num_encoder_entries=num_entries)
        arrives_at = rng.randint(0, 60) if "late_arrivals" in events else 0
        aborts_at = arrives_at + rng.randint(0, 40) if "aborts" in events and rng.random() < 0.3 else None
        if CONSTRAINED in events and self._grammar_random.random() < 0.7:
            request = self._constrain(request)
        return Job(request, arrives_at, aborts_at, *expected_output(request, self.num_used, *self.oracle))

    def _constrain(self, request: Request) -> Request:
        rng = self._grammar_random
        params = replace(
            request.params,
            structured=toy_grammar.structure(rng.randrange(4)),
            ignore_eos=rng.random() < 0.2,
            min_tokens=rng.choice([0, 0, rng.randint(1, 20)]),
        )
        stop_ids = tuple(dict.fromkeys((toy_grammar.END, *request.stop_token_ids)))
        return replace(request, params=params, stop_token_ids=stop_ids)

    @property
    def oracle(self) -> OracleKind:
        return OracleKind(bool(self.is_recurrent), TOP_K if self.is_sparse else 0)

    @property
    def num_used(self) -> int:
        """Of how many tokens the model's are: with few of them they repeat themselves."""
        return 3 if "few_tokens" in self.events else VOCAB_SIZE

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> None:
        with _no_cycles(), self._small_parts():
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

    @contextmanager
    def _small_parts(self) -> Iterator[None]:
        """Keys of latent attention in parts and chunks so small that the requests of a world have several."""
        config, rng = self.options.speculative_config, random.Random(f"latent {self.seed}")
        least = 1 + (config or {}).get("num_speculative_tokens", MAX_DRAFTS)
        with ExitStack() as patches:
            for owner, name, value in (
                (mla, "MAX_ABSORBED", max(least, rng.choice([1, 3, 17]))),
                (mla, "WORKSPACE_KEYS", rng.choice([5, 16, 64])),
                (latent_parts, "LADDER", ((2, 3), (3, 2), (7, 1 << 18))),
                (sparse_mla, "WORKSPACE_SCORES", rng.choice([30, 200, 1 << 20])),
            ):
                patches.enter_context(patch.object(owner, name, value))
            yield

    def resolve(self) -> EngineConfig:
        speculative = read_speculation(self.options)
        draft = None
        if speculative is not None and speculative.method not in ("ngram", "early_exit"):
            draft = DraftModel(self._target_config)
            if speculative.needs.in_one_pass:
                draft = DraftModel(block_config(self.head.draft_ids))
            if speculative.needs.looks_ahead:
                draft = DraftModel(self.head.config, num_modules=self.head.num_modules)
        model = RECURRENT_CONFIG if self.is_recurrent else self._target_config
        config = resolve(self.options, self.device.hardware("float64"), model, draft=draft)
        return replace(config, split_steps_from=2 if self.is_split else None)

    @property
    def _target_config(self) -> ModelConfig:
        """But for recurrent layers, which no drafter has."""
        if self.is_encoder:
            return ENCODER_CONFIG
        if self.is_cross:
            return CROSS_CONFIG
        return SPARSE_CONFIG if self.is_sparse else LATENT_CONFIG if self.is_latent else MODEL_CONFIG

    def _build(self, config: EngineConfig) -> EngineCore:
        device, max_len = self.device, config.scheduler.max_model_len
        with device.sync_guard.allow("build"):
            encoder = HashSourceEncoder() if self.is_cross else None
            choice = (max_len, device.torch_device, self.num_used)
            model: Model = HashModel(*choice, recurrent=bool(self.is_recurrent), encoder=encoder)
            if self.is_encoder:
                model = HashEncoder()
            backend = self.make_backend(config, device)
            caches = open_caches(config, config.model, device, attention=backend)
            self._backends = [backend]

            def make_speculator(rows: RowState, target_caches: CacheGroups) -> Speculator:
                if config.speculative is None:
                    return NoSpeculator()
                if config.speculative.method == "ngram":
                    return NgramSpeculator(config.speculative, rows)
                drafter = HashModel(*choice, guesses=True, encoder=encoder)
                if config.speculative.method == "early_exit":  # all layers: the hashes of fewer say nothing
                    return EarlyExitSpeculator(config, device, (drafter, NUM_LAYERS), target_caches, rows)
                own_backend = self.make_backend(config, device)
                self._backends.append(own_backend)
                assert config.draft_model is not None
                own = open_caches(config, config.draft_model, device, attention=own_backend)
                if config.speculative.needs.in_one_pass:
                    size = 1 + config.speculative.num_drafts
                    block = HashBlockHead(max_len, device.torch_device, self.num_used, self.head.draft_ids, size)
                    return DFlashSpeculator(config, device, block, own, rows)
                if config.speculative.needs.looks_ahead:
                    head = HashHead(max_len, device.torch_device, self.num_used, self.head)
                    return EagleSpeculator(config, device, head, own, rows)
                return DraftModelSpeculator(config, device, drafter, own, rows)

            draft_length, on_cost = decide_draft_length(config, caches.caps)
            if config.speculative is not None and config.speculative.adaptive and self.seed % 5 < 2:
                draft_length = RandomLength(config.speculative.lengths, self.seed)
            runner = Runner(config, device, model, caches, make_speculator, on_cost)
            if runner.splitter is not None:
                runner.splitter.choose = self._choose_split
        scheduler = Scheduler(config.scheduler, config.cache, draft_length)
        core = EngineCore(scheduler, runner, config.steps_in_flight, self._open_constraints(config, runner))
        core.clock = DrawnClock(self.seed)
        collect = core.scheduler.collect
        needs = config.scheduler.needs
        goes_over_all = needs.looks_ahead or needs.in_one_pass
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
            current = {s.request.request_id: s.generation for s in core.scheduler.running}
            for r, num_accepted in zip(result.plan.requests, result.num_accepted, strict=True):
                if current.get(r.request_id) == r.generation:
                    self._bounds[r.request_id] -= r.num_drafts - num_accepted
            return collect(result)

        core.scheduler.collect = collect_and_keep  # type: ignore[method-assign]
        schedule = core.scheduler.schedule

        def schedule_and_check() -> StepPlan | None:
            if (plan := schedule()) is not None:
                self._check_plan(core.scheduler, plan)
            return plan

        core.scheduler.schedule = schedule_and_check  # type: ignore[method-assign]
        return core

    def _open_constraints(self, config: EngineConfig, runner: Runner) -> Constraints | None:
        if CONSTRAINED not in self.events:
            return None
        # So few that masks are written over all the time.
        num_logits = runner.buffers.max_num_logits
        num_masks = num_logits + self._grammar_random.randint(0, 3)
        runner.open_masks(num_masks)
        limits = MaskLimits(VOCAB_SIZE, num_logits, num_masks, config.num_drafts)
        return Constraints(toy_grammar.ToyGrammars(), toy_grammar.LateThreads(self.seed), limits, (toy_grammar.END,))

    def _choose_split(self, common: CommonAttentionMetadata) -> int | None:
        """Anywhere; not where layers that read common pages once are counted."""
        if common.num_common_pages or self._split_random.random() < 0.3:
            return None
        at = self._split_random.randint(0, common.num_actual_tokens)
        self.num_splits += 0 < at < common.num_actual_tokens
        return at

    def _check_plan(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Bounds count what was collected and what is in flight, and no request waits for a step with room for it."""
        bounds = self._bounds
        bounds |= {init.request.request_id: init.num_computed for init in plan.row_inits}
        for r in plan.requests:
            bound = bounds[r.request_id]
            assert r.num_computed_bound == bound, f"{r.request_id}: bound {r.num_computed_bound}, not {bound}"
            bounds[r.request_id] += r.num_tokens
        decodes_only = all(r.samples and r.num_tokens == 1 + r.num_drafts for r in plan.requests)
        if scheduler.waiting and scheduler._free_rows and decodes_only and not plan.row_inits:
            state, has_tokens = scheduler.waiting[0], plan.num_tokens < scheduler.config.max_num_batched_tokens
            has_pages = scheduler._pages.num_first(state) <= scheduler.pool.num_free
            assert not (has_tokens and has_pages), f"{state.request.request_id} waits, though the step has room for it"

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
            all_choices = expected_prompt_choices(job.request, self.num_used, *self.oracle)
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
        if self.is_encoder:
            expected = np.array(pool_states(encoded(job.request.prompt_token_ids), job.request.pooling.pooling))
        else:
            expected = np.array(expected_vector(job.request, *self.oracle))
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
            draft_ids, num_modules, start = None, 1, drafted.start_before if speculative.needs.own_keys else 0
            if speculative.needs.taps:  # of states, which tell all of what was before
                draft_ids, num_modules, start = (
                    self.head.draft_ids,
                    min(self.head.num_modules, speculative.num_drafts),
                    0,
                )
            sizes = (num_modules, start, self.oracle.top_k, request.encoder)
            drafts = expected_guesses(known, following, self.num_used, draft_ids, *sizes)[:room]
            drafts += [-1] * (room - len(drafts))  # after the request's end, where drafts are arbitrary
        certain = expected_certain(request, job.tokens)[:room]
        if speculative.needs.goes_over_last:
            certain = certain[: min(num_leading(drafts, certain), max(0, len(drafts) - 1)) + 1]
        if drafts[: len(certain)] != certain:
            drafts = certain
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
        encoder = () if runner.encoder is None else (runner.encoder.ring,)
        for ring in (rows._staged._ring, runner.head.generate.outputs._ring, runner.head.ring, *encoder):
            assert all(slot.event.query() for slot in ring.slots), "a ring slot is still in use"
        if (constraints := self.core._constraints) is not None:
            assert not constraints._states, "a matcher without a request"
            assert runner.masks is not None
            assert all(slot.event.query() for slot in runner.masks._ring.slots), "staged masks are still in use"
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


def run_seed(
    seed: int,
    *,
    is_recurrent: bool | None = None,
    is_latent: bool | None = None,
    is_sparse: bool | None = None,
    is_block: bool | None = None,
    is_cross: bool | None = None,
    is_constrained: bool | None = None,
    **overrides: Any,
) -> World:
    torch.set_num_threads(1)
    kinds = {
        "is_recurrent": is_recurrent,
        "is_latent": is_latent,
        "is_sparse": is_sparse,
        "is_block": is_block,
        "is_cross": is_cross,
        "is_constrained": is_constrained,
    }
    world = World(seed, overrides, **kinds)  # type: ignore[arg-type]
    world.run()
    return world
