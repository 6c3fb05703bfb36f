"""DFlash through the whole engine: what it drafts, and that it changes no token."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.engine.core import EngineCore
from slipstream.speculate.dflash import DFlashSpeculator
from tests import tiny_models
from tests.engine.drive import make_request, run
from tests.models.heads import plain_heads, tiny_heads
from tests.models.heads.tiny_dflash import CASES, Files, PlainBlock
from tests.models.heads.tiny_heads import tiny_target
from tests.sim.tiny_engines import LIKELY
from tests.speculate.test_lossless import IN_GRAPHS, KINDS, MakeEngine, check

PAGE = 4


def write_head(files: Files, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(files[0]))
    save_file(files[1], folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS)
    return tiny_models.save(model, tmp_path_factory.mktemp("target"))


# --- what it drafts -----------------------------------------------------------------------------------


class Drafted(NamedTuple):
    tokens: list[int]
    room: int
    drafts: list[int]


def make_core(files: Files, k: int, target: Path, folder: Path, **options: Any) -> EngineCore:
    speculative = {"method": "dflash", "num_speculative_tokens": k, "model": str(write_head(files, folder))}
    given = {"dtype": "float64", "max_num_seqs": 3, "long_prefill_token_threshold": 5, "block_size": PAGE, **options}
    return build_engine(
        EngineOptions.from_dict({"model": str(target), "speculative_config": speculative, **given})
    ).core


def watch(core: EngineCore) -> list[Drafted]:
    """What is drafted from now on, with all that was known then. Nothing may be read that no pass has written."""
    drafter, seen = core.runner.speculator, []
    assert isinstance(drafter, DFlashSpeculator)
    for cache in drafter.caches.paged_memory():
        cache[1:] = torch.nan
    rows, right = drafter._rows, drafter.run

    def noting(batch: Any, noise: bool) -> Tensor:
        drafts = right(batch, noise)
        for row, ids in zip(batch.rows.tolist()[: batch.num_reqs], drafts.tolist(), strict=False):
            length = int(rows.num_tokens[row])
            if rows.step_start[row] and rows.num_computed[row] + 1 == length:
                room = max(0, int(rows.max_total[row]) - length)
                seen.append(Drafted(rows.token_ids[row, :length].tolist(), min(len(ids), room), ids))
        return drafts

    drafter.run = noting  # type: ignore[method-assign]
    return seen


class PlainTarget:
    """The target's states of texts. Those of a text's beginning are the beginning of its states."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = {}

    def states(self, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
        n = len(tokens)
        whole = next((text for text in self._known if list(text[:n]) == tokens), tuple(tokens))
        if whole not in self._known:
            target = tiny_target()
            self._known[whole] = plain_heads.target_states(torch.tensor(tokens), target.tensors, target.config)
        after, final = self._known[whole]
        return [state[:n] for state in after], final[:n]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "k"), [*((name, 7) for name in CASES), ("z-lab", 1), ("z-lab", 15), ("speculators", 3)]
)
def test_what_the_engine_drafts(name: str, k: int, target: Path, tmp_path: Path) -> None:
    """Rejected drafts, chunks, cached pages and the end of a context included."""
    files = CASES[name]()
    core = make_core(files, k, target, tmp_path)
    seen = watch(core)
    shared = [3, 200, 17, 45, 90, 8, 131, 77, 5]
    prompts = [[*shared, 4], [*shared, 9, 1, 2], shared[:3], [60, 61]]
    run(core, [make_request(f"a{i}", prompt, 8 + k) for i, prompt in enumerate(prompts)])
    # Again, over pages that are known and pages that others have used.
    run(core, [make_request(f"b{i}", [*prompt, 30 + i], 8 + k) for i, prompt in enumerate(prompts)])
    assert core.scheduler.stats.num_cached_tokens > 0
    plain = PlainBlock(*files, tiny_target().plain)
    assert sum(drafted.room == k for drafted in seen) > 20
    reference = PlainTarget()
    for tokens, room, drafts in sorted(seen, key=lambda drafted: -len(drafted.tokens)):
        count = min(k, room + plain.anchored)  # near the end of a text the block is shorter
        if count > 0:
            features = plain.features(*reference.states(tokens[:-1]))
            assert drafts[:room] == plain.propose(tokens, features, count)[0][:room]


# --- the same tokens ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def likely(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that mostly says a few words. So does a head with the same output matrix: now and then it is right."""
    model = tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS)
    with torch.no_grad():
        gains = torch.full((tiny_models.VOCAB_SIZE, 1), 0.15)
        gains[list(LIKELY)] = 1.5
        model.lm_head.weight *= gains  # type: ignore[operator]
    return tiny_models.save(model, tmp_path_factory.mktemp("likely"))


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The speculative config of a head."""

    @functools.cache
    def write(name: str) -> dict[str, Any]:
        return {"method": "dflash", "model": str(write_head(CASES[name](), tmp_path_factory.mktemp("head")))}

    return write


def maker(folder: Path) -> MakeEngine:
    def make(**options: Any) -> Engine:
        given = {"model": str(folder), "dtype": "float64", "max_num_seqs": 12, **options}
        if "speculative_config" in given:  # room for a block of every request
            given["max_num_batched_tokens"] = 12 * 16
        return build_engine(EngineOptions.from_dict(given))

    return make


def check_block(likely: Path, kind: str, count: int, speculative: dict[str, Any], **options: Any) -> Engine:
    engine = check(maker(likely), kind, count, speculative, **options)
    stats = engine.core.stats
    assert stats.num_draft_tokens > 30
    if kind == "greedy":
        assert stats.num_accepted_tokens > 50, "a drafter that is never right proves little"
    return engine


@pytest.mark.parametrize(
    ("name", "k", "kind"),
    [
        ("z-lab", 1, "sampled"),
        ("z-lab", 7, "all"),
        ("z-lab", 15, "greedy"),
        ("speculators, from the anchor", 7, "cut"),
    ],
)
def test_the_same_tokens_with_and_without_a_head(likely: Path, written: Any, name: str, k: int, kind: str) -> None:
    check_block(likely, kind, 24, {**written(name), "num_speculative_tokens": k})


@pytest.mark.parametrize(
    ("name", "k", "kind"), [("z-lab", 3, "sampled"), ("z-lab, windows", 7, "all"), ("z-lab", 1, "greedy")]
)
def test_the_same_tokens_in_graphs(likely: Path, written: Any, name: str, k: int, kind: str) -> None:
    check_block(likely, kind, 24, {**written(name), "num_speculative_tokens": k}, **IN_GRAPHS)


@pytest.mark.parametrize(("kind", "where"), [("sampled", {}), ("all", IN_GRAPHS), ("greedy", IN_GRAPHS)])
def test_the_same_tokens_however_many_are_checked_from_step_to_step(
    likely: Path, written: Any, kind: str, where: dict[str, Any], any_lengths: None
) -> None:
    check_block(likely, kind, 24, {**written("z-lab"), "num_speculative_tokens": 7, "adaptive": True}, **where)


@pytest.mark.parametrize("name", ["z-lab", "speculators"])
def test_greedy_requests_are_the_same_under_rejection(likely: Path, written: Any, name: str) -> None:
    check(maker(likely), "greedy", 24, {**written(name), "num_speculative_tokens": 7, "verify": "rejection"})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("where", [{}, IN_GRAPHS], ids=["cpu", "sim"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 7, 15])
def test_two_hundred_requests(likely: Path, written: Any, k: int, kind: str, where: dict[str, Any]) -> None:
    check_block(likely, kind, 200, {**written("z-lab"), "num_speculative_tokens": k}, **where)
