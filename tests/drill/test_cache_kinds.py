"""A new kind of cache is a spec with a backend, registered by nothing but an architecture that names it.

Two toy kinds and a toy architecture live in this folder. The engine generates with them what the same network gives
without any cache, on a CPU and on the simulated device, in graphs, with drafts, chunks and preemption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.cache_spec import page_bytes, row_bytes
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.errors import ConfigError
from slipstream.models import registry
from tests.drill.toy_caches import RunningSumsBackend
from tests.drill.toy_model import KINDS, NAME, Toy, Twin, write_model
from tests.engine.drive import make_request, run

# Repeating prompts have n-gram drafts, some of which are rejected.
PROMPTS = [[7, 9, 7, 9, 7, 9], list(range(40, 75)), [5] * 19, [200, 3, 200, 3, 200], [11]]
LENGTH = 24


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "registered", {})
    registry.register(NAME, Toy)


class Written:
    def __init__(self, folder: Path, kinds: tuple[str, ...]) -> None:
        self.folder = folder
        twin = Twin(folder, write_model(folder, kinds))
        self.expected = [twin.generate(prompt, LENGTH) for prompt in PROMPTS]

    def engine(self, **options: Any) -> Engine:
        given = {"model": str(self.folder), "dtype": "float64", "max_model_len": 128, "max_num_seqs": 3, **options}
        return build_engine(EngineOptions.from_dict(given))

    def check(self, engine: Engine) -> None:
        requests = [make_request(f"r{i}", prompt, LENGTH) for i, prompt in enumerate(PROMPTS)]
        outcomes = run(engine.core, requests)
        for i, expected in enumerate(self.expected):
            assert outcomes[f"r{i}"].token_ids == expected, f"prompt {i}"
        engine.core.scheduler.check_idle()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("toy"), KINDS)


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("paged"), ("differences", "attention", "differences"))


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
SIM = {"device": "sim", "steps_in_flight": 3}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 5},
        {"num_gpu_blocks_override": 7, **DRAFTS},  # too few for all: requests are preempted
        DRAFTS,
        {**SIM, "cudagraph_mode": "none"},
        {**SIM, "cudagraph_mode": "full", **DRAFTS},
        {**SIM, "cudagraph_mode": "piecewise", **DRAFTS},
        {**SIM, "cudagraph_mode": "full_and_piecewise", "long_prefill_token_threshold": 5},
    ],
    ids=str,
)
def test_the_twins_tokens(written: Written, options: dict[str, Any]) -> None:
    engine = written.engine(**options)
    written.check(engine)
    stats = engine.core.stats
    if "speculative_config" in options:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, "drafts of both kinds"
    if "num_gpu_blocks_override" in options:
        assert stats.num_preemptions > 0


def test_pages_of_a_new_kind_are_shared(paged: Written) -> None:
    """Paged memory alone: prefixes are found again, without a word in the scheduler."""
    engine = paged.engine(num_gpu_blocks_override=64)
    paged.check(engine)
    before = engine.core.stats.num_cached_tokens
    paged.check(engine)
    assert engine.core.stats.num_cached_tokens > before


def test_a_kind_that_cannot_be_shared_says_why(written: Written) -> None:
    scheduler = written.engine().config.scheduler
    assert not scheduler.prefix_caching
    assert "a running sum is kept of a request's end alone" in scheduler.prefix_caching_refused


def test_memory_is_a_sum_over_specs(written: Written) -> None:
    config = written.engine(**DRAFTS).config
    attention, differences, sums = config.model.cache_specs
    assert page_bytes([attention], 16, "float64") == page_bytes([differences], 16, "float64") == 2 * 2 * 16 * 8 * 8
    assert row_bytes([sums], 3, "float64") == 4 * 24 * 8
    pages, rows = config.cache.num_pages * 2 * page_bytes([attention], 16, "float64"), 4 * 4 * 24 * 8
    assert config.cache_bytes == pages + rows


def test_no_draft_model_may_have_states_of_rows(written: Written) -> None:
    with pytest.raises(ConfigError, match=r"the draft model .* keeps running sums; use a draft model with attention"):
        written.engine(speculative_config={"method": "draft_model", "model": str(written.folder)})


def test_the_twin_finds_a_state_that_is_not_rolled_back(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a step goes on from the last token that the one before computed, accepted or not."""
    engine = written.engine(**DRAFTS)
    (backend,) = (group.backend for group in engine.core.runner.caches.groups if _is_sums(group.backend))
    for rows in backend.rows.values():  # type: ignore[attr-defined]
        assert rows.shape[1] == 4
    backend.rows = {idx: rows[:, :1] for idx, rows in backend.rows.items()}  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="prompt"):
        written.check(engine)


def _is_sums(backend: object) -> bool:
    return isinstance(backend, RunningSumsBackend)


def test_the_package_knows_none_of_this() -> None:
    root = Path(registry.__file__).parent.parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        assert "RunningSums" not in text and "Differences" not in text and NAME not in text, path


def test_the_twin_is_no_echo(written: Written) -> None:
    assert all(len(set(expected)) > 4 for expected in written.expected[:2]), "a stuck model would prove little"
    assert torch.isfinite(Twin(written.folder, write_model(written.folder)).logits([1, 2, 3])).all()
