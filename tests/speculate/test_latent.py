"""A target with latent attention: the same tokens with any drafter and none.

In float64, with chunked prompts, prefix hits, too few pages, mixed batches and two steps in flight, as
``test_lossless`` has it. The draft model and the MTP layers keep latents too, the EAGLE-3 head keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.attention import mla, sparse_mla
from slipstream.attention.mla import LatentSpec
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from tests import tiny_models
from tests.engine.drive import Outcome, run
from tests.models.heads import tiny_heads
from tests.models.heads.tiny_deepseek import write_guessing
from tests.speculate.test_lossless import IN_GRAPHS, KINDS, random_requests

MakeEngine = Callable[..., Engine]
CROWDED = {
    "steps_in_flight": 2,
    "max_num_batched_tokens": 80,
    "long_prefill_token_threshold": 24,
    "block_size": 8,
    "num_gpu_blocks_override": 22,
}


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """V3 attends to all latents, V3.2 to 24 of its choice: prompts and texts are shorter and longer than that."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("target", "draft_model", "eagle3")}
    write_guessing(made["target"], num_layers=2, variant=request.param)
    model = tiny_models.build(request.param, initializer_range=0.3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter *= 0.03
            parameter += 0.01 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    tiny_models.save(model, made["draft_model"])
    taps = {tiny_heads.TAPS: [2, 1]}
    tiny_heads.eagle3(taps, {"max_position_embeddings": 512}, width=2 * tiny_heads.HIDDEN).write(made["eagle3"])
    return made


@pytest.fixture
def make_latent(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    # Prompts are longer than a chunk of keys, and some of their chunks are short enough to be absorbed.
    monkeypatch.setattr(mla, "WORKSPACE_KEYS", 48)
    monkeypatch.setattr(sparse_mla, "WORKSPACE_SCORES", 700)

    def make(**options: Any) -> Engine:
        defaults = {"model": str(folders["target"]), "dtype": "float64", "max_num_seqs": 12}
        return build_engine(EngineOptions.from_dict({**defaults, **options}))

    return make


_PLAIN: dict[tuple[str, str, int], dict[str, Outcome]] = {}


def check(make: MakeEngine, kind: str, count: int, speculative: dict[str, Any] | None, **options: Any) -> Engine:
    """Against plain decoding with room for every request, each prompt at once."""
    plain = make(enable_prefix_caching=False)
    key = (plain.config.model.architecture, kind, count)
    if key not in _PLAIN:
        _PLAIN[key] = run(plain.core, random_requests(kind, count))
    engine = make(**{**CROWDED, **options}, speculative_config=speculative)
    found = run(engine.core, random_requests(kind, count))
    for name, outcome in _PLAIN[key].items():
        assert found[name] == outcome, name
    assert engine.core.stats.num_preemptions > 0
    assert engine.core.stats.num_cached_tokens > 0
    return engine


def config_of(method: str, k: int, folders: dict[str, Path]) -> dict[str, Any]:
    own = {"model": str(folders[method])} if method in folders else {}
    return {"method": method, "num_speculative_tokens": k, **own}


DENSE, SPARSE = "deepseek-v3", "deepseek-v3.2"
CASES = [
    (DENSE, "ngram", "greedy"),
    (DENSE, "draft_model", "sampled"),
    (DENSE, "mtp", "all"),
    (DENSE, "eagle3", "greedy"),
]
SPARSE_CASES = [(SPARSE, "ngram", "greedy"), (SPARSE, "draft_model", "sampled"), (SPARSE, "mtp", "all")]


@pytest.mark.parametrize(
    ("folders", "method", "kind"), [*CASES, *SPARSE_CASES, (SPARSE, "eagle3", "greedy")], indirect=["folders"]
)
def test_the_same_tokens_with_and_without_drafts(
    make_latent: MakeEngine, folders: dict[str, Path], method: str, kind: str
) -> None:
    engine = check(make_latent, kind, 24, config_of(method, 3, folders))
    stats = engine.core.stats
    assert stats.num_draft_tokens > 30
    if method in ("draft_model", "mtp"):
        assert 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.98, "accepted drafts, and rejected ones"


@pytest.mark.parametrize(
    ("folders", "method", "kind"), [*CASES, SPARSE_CASES[0], SPARSE_CASES[2]], indirect=["folders"]
)
def test_the_same_tokens_in_graphs_on_a_device_that_runs_later(
    make_latent: MakeEngine, folders: dict[str, Path], method: str, kind: str
) -> None:
    engine = check(make_latent, kind, 24, config_of(method, 3, folders), **IN_GRAPHS)
    assert engine.core.runner.device.sync_guard.num_violations == 0
    assert engine.core.runner.graphs.num_recorded > 0


@pytest.mark.parametrize(
    ("folders", "where"),
    [(DENSE, {}), (DENSE, IN_GRAPHS), (SPARSE, {})],
    indirect=["folders"],
    ids=["cpu", "sim", "sparse"],
)
def test_the_same_tokens_with_any_number_of_drafts(
    make_latent: MakeEngine, folders: dict[str, Path], any_lengths: None, where: dict[str, Any]
) -> None:
    for method in ("draft_model", "mtp"):
        check(make_latent, "greedy", 16, {**config_of(method, 5, folders), "adaptive": True}, **where)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", [{}, IN_GRAPHS], ids=["cpu", "sim"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp", "eagle3"])
@pytest.mark.parametrize("folders", [DENSE, SPARSE], indirect=True)
def test_two_hundred_requests(
    make_latent: MakeEngine, folders: dict[str, Path], method: str, kind: str, where: dict[str, Any]
) -> None:
    check(make_latent, kind, 200, config_of(method, 4, folders), **where)


@pytest.mark.parametrize("folders", [DENSE], indirect=True)
def test_drafters_share_what_a_step_has_built(make_latent: MakeEngine, folders: dict[str, Path]) -> None:
    """An MTP layer keeps latents of its own, in pages of the same ids; a head keys and values."""
    engine = make_latent(speculative_config=config_of("mtp", 2, folders))
    caches, own = engine.core.runner.caches, engine.core.runner.speculator.caches  # type: ignore[attr-defined]
    assert own.can_share(caches)
    assert all(isinstance(group.spec, LatentSpec) for group in own.groups)
    assert not make_latent(speculative_config=config_of("eagle3", 2, folders)).core.runner.speculator.caches.can_share(
        caches
    )  # type: ignore[attr-defined]
