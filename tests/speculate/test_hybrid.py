"""A target with recurrent layers: the same tokens with any drafter and none, for rejected drafts leave no trace.

In float64, with chunked prompts, too few pages, mixed batches and two steps in flight, as ``test_lossless`` has it.
Pages are not shared here: prompts that begin alike are computed each for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.attention.gdn import GDNAttentionMetadata
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.errors import ConfigError
from tests import tiny_models
from tests.engine.drive import Outcome, make_request, run
from tests.models.heads.tiny_mtp import write_hybrid
from tests.speculate.test_lossless import IN_GRAPHS, KINDS, random_requests

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def last_token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter with attention alone, that has the target's embedding and head and nothing between them."""
    target = tiny_models.build("qwen3-next", initializer_range=0.3)
    model = tiny_models.build("llama", num_hidden_layers=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif "layers" not in name:
                parameter.copy_(target.get_parameter(name) + ("norm" in name))
    return tiny_models.save(model, tmp_path_factory.mktemp("last-token"))


@pytest.fixture
def make_hybrid(hybrid_folder: Path) -> MakeEngine:
    def make(**options: Any) -> Engine:
        defaults = {"model": str(hybrid_folder), "dtype": "float64", "max_num_seqs": 12}
        return build_engine(EngineOptions.from_dict({**defaults, **options}))

    return make


_PLAIN: dict[tuple[str, int], dict[str, Outcome]] = {}
CROWDED = {
    "steps_in_flight": 2,
    "max_num_batched_tokens": 80,
    "long_prefill_token_threshold": 24,
    "block_size": 8,
    "num_gpu_blocks_override": 22,
}


def check(make: MakeEngine, kind: str, count: int, speculative: dict[str, Any] | None, **options: Any) -> Engine:
    """Against plain decoding with room for everybody, each prompt in one go."""
    if (kind, count) not in _PLAIN:
        _PLAIN[kind, count] = run(make().core, random_requests(kind, count))
    engine = make(**{**CROWDED, **options}, speculative_config=speculative)
    found = run(engine.core, random_requests(kind, count))
    for name, outcome in _PLAIN[kind, count].items():
        assert found[name] == outcome, name
    assert engine.core.stats.num_preemptions > 0
    assert engine.core.stats.num_cached_tokens == 0
    return engine


def config_of(method: str, k: int, folders: dict[str, Path]) -> dict[str, Any]:
    own = {"model": str(folders[method])} if method in folders else {}
    return {"method": method, "num_speculative_tokens": k, **own}


@pytest.fixture
def folders(last_token_folder: Path) -> dict[str, Path]:
    return {"draft_model": last_token_folder}


@pytest.mark.parametrize(("method", "kind"), [("ngram", "greedy"), ("draft_model", "sampled"), ("mtp", "all")])
def test_the_same_tokens_with_and_without_drafts(
    make_hybrid: MakeEngine, folders: dict[str, Path], method: str, kind: str
) -> None:
    engine = check(make_hybrid, kind, 16, config_of(method, 3, folders))
    stats = engine.core.stats
    assert stats.num_draft_tokens > 30
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9, "accepted drafts, and rejected ones"


def test_the_same_tokens_in_any_batch(make_hybrid: MakeEngine) -> None:
    """One request after the other; all together in small chunks, too many for the pages."""
    requests = random_requests("greedy", 16)
    alone = make_hybrid(max_num_seqs=1)
    assert run(alone.core, requests[:6]).items() <= run(make_hybrid(**CROWDED).core, requests).items()
    # Alone too: chunks of as many tokens as there are states, or fewer, go token by token.
    speculative = {"method": "ngram", "num_speculative_tokens": 4}
    few = make_hybrid(max_num_seqs=2, speculative_config=speculative, long_prefill_token_threshold=5)
    assert run(few.core, requests[:6]) == run(alone.core, requests[:6])


@pytest.mark.parametrize(("method", "kind"), [("ngram", "greedy"), ("draft_model", "sampled"), ("mtp", "greedy")])
def test_the_same_tokens_in_graphs_on_a_device_that_runs_later(
    make_hybrid: MakeEngine, folders: dict[str, Path], method: str, kind: str
) -> None:
    engine = check(make_hybrid, kind, 16, config_of(method, 3, folders), **IN_GRAPHS)
    assert engine.core.runner.device.sync_guard.num_violations == 0
    assert engine.core.runner.graphs.num_recorded > 0


def test_the_same_tokens_in_pieces_with_any_number_of_drafts(
    make_hybrid: MakeEngine, folders: dict[str, Path], any_lengths: None
) -> None:
    """A delta net's layers are recorded between the pieces' ends, whatever the draft length is from step to step."""
    speculative = {**config_of("draft_model", 5, folders), "adaptive": True}
    pieces = {**IN_GRAPHS, "cudagraph_mode": "piecewise", "cudagraph_capture_sizes": (16, 80)}
    engine = check(make_hybrid, "greedy", 16, speculative, **pieces)
    assert engine.core.stats.num_accepted_tokens > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("where", [{}, IN_GRAPHS], ids=["cpu", "sim"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp"])
def test_two_hundred_requests(
    make_hybrid: MakeEngine, folders: dict[str, Path], method: str, k: int, kind: str, where: dict[str, Any]
) -> None:
    check(make_hybrid, kind, 200, config_of(method, k, folders), **where)


def test_prompts_that_are_the_same_are_computed_each_for_itself(
    make_hybrid: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_hybrid(block_size=4)
    assert "prefix caching is off" in caplog.text
    requests = [make_request(f"r{i}", range(1, 40), 12) for i in range(5)]
    found = run(engine.core, requests)
    later = run(engine.core, [make_request("later", range(1, 40), 12)])
    assert len({tuple(outcome.token_ids) for outcome in (*found.values(), *later.values())}) == 1
    assert (engine.core.stats.num_cached_tokens, engine.core.stats.prefix_cache_refused) == (0, 1)
    caplog.clear()
    quiet = make_hybrid(enable_prefix_caching=False)
    assert (caplog.text, quiet.core.stats.prefix_cache_refused) == ("", 0)


def test_a_recurrent_drafter_is_refused(make_engine: MakeEngine, hybrid_folder: Path) -> None:
    speculative = {"method": "draft_model", "model": str(hybrid_folder), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=r"has recurrent layers, .* use a draft model with attention alone"):
        make_engine(speculative_config=speculative)


# --- faults, planted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["a token too far", "not far enough", "another row's"])
def test_a_wrong_state_is_a_wrong_token(make_hybrid: MakeEngine, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Rolled back a token too far, or not far enough, or to another request's."""
    requests = random_requests("greedy", 8)
    expected = run(make_hybrid().core, requests)
    right = GDNAttentionMetadata.build.__func__  # type: ignore[attr-defined]

    def faulty(cls: type, common: CommonAttentionMetadata, num_states: int) -> GDNAttentionMetadata:
        built: GDNAttentionMetadata = right(cls, common, num_states)
        if fault == "another row's":
            return replace(built, slots=built.slots.flip(0))
        wrong = -1 if fault == "a token too far" else 1
        return replace(built, positions=torch.where(built.positions > 0, built.positions + wrong, 0))

    monkeypatch.setattr(GDNAttentionMetadata, "build", classmethod(faulty))
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    assert run(make_hybrid(speculative_config=speculative).core, requests) != expected
