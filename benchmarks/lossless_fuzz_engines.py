"""The engines of ``lossless_fuzz.py``: several for each drafter, options drawn, and a plain one for each target."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

from lossless_fuzz_models import CONTEXT, Folders
from lossless_fuzz_requests import MAX_TOTAL
from slipstream.attention.backend import Caps
from slipstream.config import EngineConfig, EngineOptions
from slipstream.engine import build
from slipstream.engine.build import Engine, build_engine
from slipstream.plan import Composition
from slipstream.runner.step_timing import OnCost
from slipstream.scheduler.draft_length import AdaptiveLength, DraftLength
from slipstream.scheduler.step_costs import StepCosts
from slipstream.speculate.registry import find_method
from tests.sim.world import RandomLength

# How many drafts a step checks: the same number always; drawn anew every few steps; as the engine itself decides.
LENGTHS = ("fixed", "drawn", "adaptive")
_STEPS_IN_FLIGHT = (2, 1, 4)
MOST_LATE = 3  # steps until an engine hears of an end that the output thread has found


@dataclass(frozen=True)
class Drafter:
    name: str  # of a row of the table
    target: str  # the folder of the checkpoint
    method: str | None = None
    model: str | None = None  # the folder of the draft model or head

    @property
    def plain(self) -> str:
        """The folder of the target without drafts."""
        return "hybrid" if self.target == "hybrid" else "target"

    @property
    def case(self) -> str:
        shape = "tiny-qwen3-next" if self.target == "hybrid" else "tiny-llama"
        return f"{shape}+{self.method}" if self.method else shape


DRAFTERS = (
    Drafter("none", "target"),
    Drafter("ngram", "target", "ngram"),
    Drafter("draft model", "target", "draft_model", "draft_model"),
    Drafter("EAGLE", "target", "eagle", "eagle"),
    Drafter("EAGLE-3", "target", "eagle3", "eagle3"),
    Drafter("MTP", "mtp", "mtp"),
    Drafter("hybrid, none", "hybrid"),
    Drafter("hybrid, ngram", "hybrid", "ngram"),
    Drafter("hybrid, MTP", "hybrid", "mtp"),
)


# Of models that ``--exact`` can serve.
EXACT_DRAFTERS = tuple(drafter for drafter in DRAFTERS if drafter.target != "hybrid")


@dataclass(frozen=True)
class EngineChoice:
    """One engine, as drawn: what it takes to build it again."""

    drafter: Drafter
    seed: int
    lengths: str
    options: dict[str, Any]  # of ``EngineOptions``, without folders
    num_drafts: int  # most that a step checks

    def as_dict(self) -> dict[str, Any]:
        method = self.drafter.method
        return {"lengths": self.lengths, "k": self.num_drafts if method else 0, **self.options}


def draw_engine(seed: int, engine_idx: int, drafters: tuple[Drafter, ...]) -> EngineChoice:
    """Each drafter's engines go through steps in flight, kinds of lengths and prefix cache in turn; the rest is drawn.

    Requests of many lengths in a pool that holds little more than the longest: some are preempted.
    """
    rng = random.Random(f"engine {seed} {engine_idx}")
    drafter, turn = drafters[engine_idx % len(drafters)], engine_idx // len(drafters)
    drafter_idx = engine_idx % len(drafters)
    num_drafts = rng.choice([1, 2, 3, 5, 7])
    max_num_seqs, block_size = rng.choice([3, 5, 8, 12]), rng.choice([4, 8, 16])
    num_slots = rng.choice([MAX_TOTAL, MAX_TOTAL + 32, 2 * MAX_TOTAL])
    options = {
        "max_model_len": CONTEXT,
        "max_num_seqs": max_num_seqs,
        "block_size": block_size,
        "num_gpu_blocks_override": -(-num_slots // block_size),
        "max_num_batched_tokens": max(max_num_seqs * (1 + num_drafts), rng.choice([24, 64, 128])),
        "long_prefill_token_threshold": rng.choice([5, 16, 24, None]),
        "mixed_prefill_tokens": rng.choice([7, 32, None]),
        # Pages of recurrent layers are not shared.
        "enable_prefix_caching": drafter.plain != "hybrid" and (drafter_idx + turn) % 3 != 2,
        "steps_in_flight": _STEPS_IN_FLIGHT[(drafter_idx + seed + turn) % 3],
        "seed": rng.getrandbits(32),
    }
    # Not in step with the number of steps in flight.
    lengths = LENGTHS[(turn + turn // 3 + drafter_idx) % 3] if drafter.method else "fixed"
    return EngineChoice(drafter, rng.getrandbits(32), lengths, options, num_drafts)


def numbers_of(exact: bool) -> dict[str, Any]:
    """In float64 rounding changes no token; with ``exact`` it may not in the type that users have."""
    return {"exact": True} if exact else {"dtype": "float64"}


def build_fuzzed(choice: EngineChoice, folders: Folders, device: str, exact: bool = False) -> Engine:
    drafter = choice.drafter
    given: dict[str, Any] = {"model": str(getattr(folders, drafter.target)), "device": device, **numbers_of(exact)}
    if device == "cuda":
        given["gpu_memory_utilization"] = 0.2  # another engine is beside it
    if device != "cpu":
        given |= {"cudagraph_mode": "full", "cudagraph_capture_sizes": (4, 12, 32, 80)}
    if drafter.method is not None:
        speculative = {"method": drafter.method, "num_speculative_tokens": choice.num_drafts}
        speculative["adaptive"] = choice.lengths != "fixed"
        if drafter.model is not None:
            speculative["model"] = str(getattr(folders, drafter.model))
        given["speculative_config"] = speculative

    def decide(config: EngineConfig, _caps: Caps) -> tuple[DraftLength | None, OnCost | None]:
        return _decide_length(config, choice), None

    with mock.patch.object(build, "decide_draft_length", decide):
        return build_engine(EngineOptions.from_dict({**given, **choice.options}))


def build_plain(folder: str, folders: Folders, device: str = "cpu", exact: bool = False) -> Engine:
    """The reference: one request at a time, no drafts, no prefix cache, one step in flight, room for all tokens."""
    given: dict[str, Any] = {"model": str(getattr(folders, folder)), "device": device, **numbers_of(exact)}
    if device == "cuda":
        given |= {"gpu_memory_utilization": 0.2, "cudagraph_mode": "none"}
    alone = {"max_num_seqs": 1, "steps_in_flight": 1, "enable_prefix_caching": False, "max_model_len": CONTEXT}
    return build_engine(EngineOptions.from_dict(given | alone))


# --- draft lengths that do not depend on a clock ----------------------------------------------------


class _UntimedLength(AdaptiveLength):
    """The engine's own decisions, at costs that no step changes: timed ones would make another run every time."""

    def record_seconds(self, composition: Composition, seconds: float) -> None:
        pass


def _decide_length(config: EngineConfig, choice: EngineChoice) -> DraftLength | None:
    speculative = config.speculative
    if speculative is None or not speculative.adaptive:
        return None
    if choice.lengths == "drawn":
        return RandomLength(speculative.lengths, choice.seed)
    num_rows, costs = config.scheduler.max_num_seqs, StepCosts(in_graphs=False)
    for num_reqs in range(1, num_rows + 1):
        for num_drafts in speculative.lengths:
            costs.record(num_reqs, num_drafts, 1e-3 * (1 + 0.002 * num_reqs * (1 + num_drafts)))
    rehearsal = None
    if speculative.depends_on_text_alone:
        rehearsal = find_method(speculative.method).rehearse(speculative, num_rows)
    own = (speculative.lengths, speculative.initial_length, num_rows, costs, speculative.knows_acceptance, rehearsal)
    return _UntimedLength(*own)
