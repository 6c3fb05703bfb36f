"""Steps replayed on a CPU: the same tokens, drafts and results as steps that are launched one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.engine.core import EngineCore
from slipstream.kernels import native
from slipstream.runner import repeated_step
from tests import tiny_models
from tests.engine.drive import Outcome, make_request, run
from tests.models.heads import tiny_heads

needs_c = pytest.mark.skipif(native.library() is None, reason="there is no C compiler here")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS)
    return tiny_models.save(model, tmp_path_factory.mktemp("target"))


def build(target: Path, **options: Any) -> EngineCore:
    return build_engine(EngineOptions.from_dict({"model": str(target), "dtype": "float32", **options})).core


def serve(core: EngineCore) -> tuple[dict[str, Outcome], int]:
    """One request alone, then several of other lengths, drawn and greedy. Tokens, and the drafts that were accepted."""
    found = run(core, [make_request("alone", [1, 2, 3, 1, 2, 3], 40)])
    some = [make_request(f"{i}", range(i, i + 5), 20 + 7 * i, temperature=0.7 * (i % 2), seed=i) for i in range(4)]
    found |= run(core, some)
    return found, core.stats.num_accepted_tokens


def num_replayed(core: EngineCore) -> int:
    prepared = core.runner.batches._kept.values()
    return sum(batch.repeated is not None and batch.repeated._graph is not None for batch in prepared)


@needs_c
@pytest.mark.parametrize("method", ["none", "ngram", "eagle3", "early_exit"])
@pytest.mark.parametrize("pages", [None, 12], ids=["", "preempted"])
def test_the_same_steps(
    target: Path, method: str, pages: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_gpu_blocks_override": pages, "max_model_len": 96, "block_size": 16}
    if method != "none":
        own = {"model": str(tiny_heads.eagle3(body={"max_position_embeddings": 512}).write(tmp_path))}
        options["speculative_config"] = {
            "method": method,
            "num_speculative_tokens": 3,
            **(own if method == "eagle3" else {}),
        }
    replayed = build(target, **options)
    found = serve(replayed)
    assert num_replayed(replayed) > 0
    monkeypatch.setattr(repeated_step, "_RECORDED_AT", 1 << 30)
    launched = build(target, **options)
    assert found == serve(launched)
    assert num_replayed(launched) == 0


@needs_c
def test_a_step_that_is_recorded_says_nothing_of_its_cost(target: Path) -> None:
    core = build(target)
    core.add(make_request("one", [1, 2, 3], 12))
    told = []
    while core.has_work:
        core.step()
        told.append(core.runner.newest_was_recorded)
    assert told.count(True) == 1


def test_launches_that_depend_on_lengths_are_not_replayed(target: Path) -> None:
    """Attention in plain torch gathers keys up to the longest of them; after a few tries no step is recorded."""
    core = build(target, dtype="float64")
    found, _ = serve(core)
    assert len(found) == 5 and num_replayed(core) == 0
    recorder = core.runner.batches._recorder
    assert recorder is not None and not recorder.is_useful
