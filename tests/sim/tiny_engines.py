"""Whole engines over a tiny network of real layers on the simulated device, and what they did step by step.

The worlds of ``world.py`` run a hash, through which any attention will do. Here every backend builds and computes as
it would for a user; only FlashInfer's kernels are played, by ``fake_flashinfer.py``.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from slipstream.attention import choice
from slipstream.attention.backends.flashinfer_paths import Paths
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.graphs.piecewise import PiecewiseForward
from slipstream.plan import StepPlan
from slipstream.request import Request
from slipstream.runner.batch import PreparedBatch
from slipstream.runner.executor import StepExecutor
from slipstream.runner.program import LaunchedStep
from slipstream.runner.runner import Runner
from tests import tiny_models
from tests.attention.backends.fake_flashinfer import FakeLibrary, paths_of
from tests.engine.drive import make_request
from tests.models.heads import tiny_heads

K = 3
LIKELY = (3, 77, 120, 200)  # what the target mostly says, and all that the head knows
METHODS = ("none", "ngram", "eagle3")
FLASHINFER: dict[str, Paths] = {
    "native": paths_of("native", "native"),
    "native-xqa": paths_of("native", "xqa"),
    "trtllm": paths_of("trtllm", "trtllm"),
}
BACKENDS = ("reference", "triton", "flex", *FLASHINFER)
# Prompts in chunks, too few pages for all that run, graphs that most batches have to be padded for.
SMALL: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 20,
    "long_prefill_token_threshold": 7,
    "block_size": 4,
}
ON_SIM: dict[str, Any] = {
    "device": "sim",
    "steps_in_flight": 2,
    "num_gpu_blocks_override": 17,
    "cudagraph_mode": "full",
    "cudagraph_capture_sizes": (4, 20),
}


# --- networks and requests --------------------------------------------------------------------------


@dataclass(frozen=True)
class Folders:
    target: Path
    head: Path


def write(folder: Path) -> Folders:
    """A target that mostly says a few words, so that a head which knows no others is right now and then."""
    model = tiny_models.build("llama", num_hidden_layers=2)
    with torch.no_grad():
        gains = torch.full((tiny_models.VOCAB_SIZE, 1), 0.15)
        gains[list(LIKELY)] = 1.5
        model.lm_head.weight *= gains  # type: ignore[operator]
    config = {tiny_heads.TAPS: [2, 1], "draft_vocab_size": len(LIKELY)}
    head = tiny_heads.eagle3(config, {"max_position_embeddings": 512}, width=2 * tiny_heads.HIDDEN)
    ids, mask = torch.tensor(LIKELY), torch.zeros(tiny_models.VOCAB_SIZE, dtype=torch.bool)
    mask[ids] = True
    head.tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": mask}
    head.tensors["lm_head.weight"] = head.tensors["lm_head.weight"][: len(ids)].clone()
    paths = folder / "target", folder / "head"
    for path in paths:
        path.mkdir()
    return Folders(tiny_models.save(model, paths[0]), head.write(paths[1]))


class Arrival(NamedTuple):
    turn: int
    request: Request


def arrivals(count: int = 7) -> list[Arrival]:
    """Prompts that begin alike and repeat themselves, while others decode; greedy, sampled, and with parameters."""
    rng = random.Random(3)
    stem = [rng.randrange(256) for _ in range(26)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 1.0, "speculate": False},
    ]
    made = []
    for i in range(count):
        own = [rng.randrange(256) for _ in range((1, 4, 9, 3)[i % 4])]
        prompt = (stem if i % 3 != 1 else []) + own * (1 + 2 * (i % 2))
        stops = (LIKELY[2],) if i % 5 == 4 else ()
        params = kinds[(0, 1, 0, 2, 1, 0, 3)[i % 7]]
        made.append(Arrival(3 * i, make_request(f"r{i}", prompt, (12, 8, 12)[i % 3], stops, i, **params)))
    return made


def shortened(requests: list[Arrival], max_tokens: int) -> list[Arrival]:
    lens = [min(len(r.prompt_token_ids) + max_tokens, r.max_total_tokens) for _, r in requests]
    return [Arrival(turn, replace(r, max_total_tokens=n)) for (turn, r), n in zip(requests, lens, strict=True)]


def decoding() -> list[Arrival]:
    """All at once, and as many as there are rows: after their prompts they decode together."""
    return [Arrival(0, make_request(f"d{i}", [5, 9, 5, 9, i], 16, seed=i, temperature=0.7 * (i % 2))) for i in range(4)]


# --- engines ----------------------------------------------------------------------------------------


def options_of(folders: Folders, method: str, **options: Any) -> EngineOptions:
    speculative: dict[str, Any] | None = None
    if method != "none":
        speculative = {"method": method, "num_speculative_tokens": K}
        if method == "eagle3":
            speculative["model"] = str(folders.head)
    given = {"model": str(folders.target), **SMALL, "speculative_config": speculative, **options}
    return EngineOptions.from_dict(given)


def expected(folders: Folders, requests: list[Arrival]) -> dict[str, list[int]]:
    """Plain, by the definition, one step after another."""
    options = {"device": "cpu", "attention_backend": "reference", "enable_prefix_caching": False}
    return run(build_engine(options_of(folders, "none", **options)), requests)


def play_flashinfer(patch: pytest.MonkeyPatch, paths: Paths) -> list[FakeLibrary]:
    """The simulated device has FlashInfer with these paths. All that resolves and builds it is the engine's own."""
    libraries: list[FakeLibrary] = []

    def make_library(paths: Paths, _device: torch.device) -> FakeLibrary:
        libraries.append(FakeLibrary(paths.decode.path))
        return libraries[-1]

    patch.setitem(choice._USABLE, "sim", (*choice._USABLE["sim"], "flashinfer"))
    patch.setattr(choice, "flashinfer_paths", lambda *_model: paths)
    patch.setattr(choice, "FlashInferLibrary", make_library)
    return libraries


class Launch(NamedTuple):
    """A step, when it was launched."""

    num_before: int  # others under way
    num_drains: int  # so far
    has_prompts: bool  # as far as one can tell: a prompt's last token, alone, is a decode
    has_decodes: bool
    num_plans: int  # that its attention made on the host
    mode: CUDAGraphMode  # of its target's pass


@dataclass
class Watched:
    """An engine, every step it launched, and every forward pass that it replayed in pieces."""

    engine: Engine
    libraries: list[FakeLibrary]
    launches: list[Launch] = field(default_factory=list)
    replays: list[PiecewiseForward] = field(default_factory=list)

    @property
    def num_plans(self) -> int:
        return sum(len(library.calls) for library in self.libraries)

    @property
    def num_mixed(self) -> int:
        return sum(launch.has_prompts and launch.has_decodes for launch in self.launches)

    def modes(self, with_prompts: bool) -> Counter[CUDAGraphMode]:
        return Counter(launch.mode for launch in self.launches if launch.has_prompts is with_prompts)

    @property
    def num_target_replays(self) -> int:
        own = {id(pieces) for pieces in self.engine.core.runner.graphs.pieces.values()}
        return sum(id(pieces) in own for pieces in self.replays)


def watch(
    patch: pytest.MonkeyPatch, folders: Folders, backend: str, method: str, *, record_all: bool = True, **options: Any
) -> Watched:
    """An engine of that backend on the simulated device, with every graph it may have."""
    libraries: list[FakeLibrary] = []
    if backend in FLASHINFER:
        libraries, backend = play_flashinfer(patch, FLASHINFER[backend]), "flashinfer"
    given = options_of(folders, method, **{**ON_SIM, "attention_backend": backend, **options})
    watched = Watched(build_engine(given), libraries)
    core = watched.engine.core
    while record_all and core.use_idle_time():
        pass
    launch, replay, run_step = Runner._launch, PiecewiseForward.replay, StepExecutor.run
    modes: list[CUDAGraphMode] = []

    def launch_watched(self: Runner, plan: StepPlan) -> LaunchedStep:
        before, drains, plans = len(core._in_flight), core.stats.num_drains, watched.num_plans
        who = plan.composition
        decodes = [n == 1 + k for n, k in zip(who.num_tokens, who.num_drafts, strict=True)]
        step = launch(self, plan)
        kinds = (not all(decodes) or len({*who.num_tokens}) > 1, any(decodes))
        watched.launches.append(Launch(before, drains, *kinds, watched.num_plans - plans, modes.pop()))
        return step

    def run_watched(self: StepExecutor, batch: PreparedBatch) -> Any:
        modes.append(batch.graph.desc.mode)
        return run_step(self, batch)

    def replay_watched(self: PiecewiseForward, context: Any) -> Any:
        watched.replays.append(self)
        return replay(self, context)

    patch.setattr(Runner, "_launch", launch_watched)
    patch.setattr(StepExecutor, "run", run_watched)
    patch.setattr(PiecewiseForward, "replay", replay_watched)
    return watched


def run(engine: Engine, requests: list[Arrival], max_turns: int = 1000) -> dict[str, list[int]]:
    """Tokens of each request; pages, rows and slots are home at the end, and nothing has synchronised."""
    core, waiting = engine.core, sorted(requests, key=lambda arrival: arrival.turn)
    tokens: dict[str, list[int]] = {arrival.request.request_id: [] for arrival in requests}
    for turn in range(max_turns):
        while waiting and waiting[0].turn <= turn:
            core.add(waiting.pop(0).request)
        if not waiting and not core.has_work:
            break
        for update in core.step():
            assert update.error is None, update.error
            tokens[update.request_id] += update.token_ids
    else:
        raise AssertionError("the engine does not come to an end")
    core.scheduler.check_idle()
    assert core.stats.num_sync_violations == 0
    return tokens
