"""Heads over the target's hidden states: EAGLE, EAGLE-3 and MTP change no token, whatever they draft."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.config import EngineOptions
from slipstream.engine import build
from slipstream.engine.build import Engine, build_engine
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.scheduler.draft_length import FixedLength
from slipstream.speculate.eagle import EagleSpeculator
from slipstream.speculate.head_follower import HeadFollower
from tests import tiny_models
from tests.engine.drive import make_request
from tests.models.heads import tiny_heads
from tests.speculate.test_lossless import IN_GRAPHS, KINDS, MakeEngine, check

LONG = {"max_position_embeddings": 512}
# Method and what writes its head; MTP layers are written into the target's own folder.
HEADS: dict[str, tuple[str, Callable[[], tiny_heads.Case]]] = {
    "eagle": ("eagle", lambda: tiny_heads.eagle(LONG)),
    "eagle3": ("eagle3", lambda: tiny_heads.eagle3(body=LONG)),
    "eagle3-whole-vocabulary": ("eagle3", lambda: tiny_heads.eagle3(body=LONG, reduced=False)),
    "eagle3-speculators": ("eagle3", lambda: tiny_heads.eagle3(tiny_heads.SPECULATORS, body=LONG, layer="layers.0.")),
    "mtp-deepseek": ("mtp", tiny_heads.deepseek),
    "mtp-qwen": ("mtp", functools.partial(tiny_heads.qwen_mtp, 2)),
}


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """The folder of a target, and the speculative config of a head over it."""
    target = tiny_models.save(
        tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS), tmp_path_factory.mktemp("target")
    )

    @functools.cache
    def write(name: str) -> tuple[Path, dict[str, Any]]:
        method, make = HEADS[name]
        case, folder = make(), tmp_path_factory.mktemp(name)
        if method != "mtp":
            return target, {"method": method, "model": str(case.write(folder))}
        model = tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS)
        tiny_models.save(model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**case.config, **config}))
        own = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(own | {n: t.float() for n, t in case.tensors.items()}, folder / "model.safetensors")
        return folder, {"method": "mtp"}

    return write


def maker(folder: Path) -> MakeEngine:
    def make(**options: Any) -> Engine:
        defaults = {"model": str(folder), "dtype": "float64", "max_num_seqs": 12}
        return build_engine(EngineOptions.from_dict({**defaults, **options}))

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "k"), [("eagle", 3), ("eagle3", 5), ("mtp-deepseek", 1), ("mtp-qwen", 3)])
def test_the_same_tokens_with_and_without_a_head(written: Any, name: str, k: int, kind: str) -> None:
    folder, speculative = written(name)
    engine = check(maker(folder), kind, 24, {**speculative, "num_speculative_tokens": k})
    assert engine.core.stats.num_draft_tokens > 60


@pytest.mark.parametrize(("name", "kind"), [("eagle", "sampled"), ("eagle3", "all"), ("mtp-deepseek", "greedy")])
def test_the_same_tokens_in_graphs(written: Any, name: str, kind: str) -> None:
    folder, speculative = written(name)
    check(maker(folder), kind, 24, {**speculative, "num_speculative_tokens": 3}, **IN_GRAPHS)


@pytest.mark.parametrize(
    ("name", "kind", "where"),
    [
        ("eagle3", "sampled", {}),
        ("mtp-qwen", "greedy", {}),
        ("eagle", "all", IN_GRAPHS),
        ("eagle3", "greedy", IN_GRAPHS),
    ],
)
def test_the_same_tokens_however_many_are_drafted_from_step_to_step(
    written: Any, name: str, kind: str, where: dict[str, Any], any_lengths: None
) -> None:
    folder, speculative = written(name)
    check(maker(folder), kind, 24, {**speculative, "num_speculative_tokens": 5, "adaptive": True}, **where)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("where", [{}, IN_GRAPHS], ids=["cpu", "sim"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("name", HEADS)
def test_two_hundred_requests(written: Any, name: str, k: int, kind: str, where: dict[str, Any]) -> None:
    folder, speculative = written(name)
    check(maker(folder), kind, 200, {**speculative, "num_speculative_tokens": k}, **where)


@pytest.mark.parametrize("name", ["eagle3", "eagle3-whole-vocabulary"])
def test_greedy_requests_are_the_same_under_rejection(written: Any, name: str) -> None:
    folder, speculative = written(name)
    check(maker(folder), "greedy", 24, {**speculative, "num_speculative_tokens": 3, "verify": "rejection"})
    assert torch.get_default_dtype() is torch.float32, "building a head leaves the type as it was"


@pytest.mark.parametrize("where", [{}, IN_GRAPHS], ids=["cpu", "sim"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp-deepseek", "mtp-qwen"])
def test_a_head_that_makes_no_drafts_keeps_up(
    written: Any, name: str, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values are those of a head that was asked after every step."""
    folder, speculative = written(name)
    requests = [make_request(f"r{i}", [5, 6, 7 + i], 24) for i in range(3)]

    def kept(length: int) -> list[torch.Tensor]:
        monkeypatch.setattr(build, "decide_draft_length", lambda _config, _backend: (FixedLength(length), None))
        config = {**speculative, "num_speculative_tokens": 3, "adaptive": True}
        engine = maker(folder)(speculative_config=config, max_num_seqs=4, block_size=64, **where)
        core, ends = engine.core, {}
        while where and core.use_idle_time():  # until all graphs are there
            pass
        for request in requests:
            core.add(request)
        pages = {}
        while core.has_work:
            core.step()
            pages |= {state.request.request_id: state.page_ids[0] for state in core.scheduler.running if state.page_ids}
            ends |= {state.request.request_id: list(state.token_ids) for state in core.scheduler.running}
        assert (core.stats.num_draft_tokens > 0) is (length > 0)
        assert isinstance(core.runner.speculator, EagleSpeculator)
        follower = core.runner.speculator.follower
        assert isinstance(follower, HeadFollower)
        with core.runner.device.use_stream(core.runner.device.compute_stream), torch.inference_mode():
            follower.catch_up()
        caches = core.runner.speculator.caches.paged_memory()
        num_kept = min(map(len, ends.values())) - 6  # drafts may follow them
        drafting = core.runner.rows.state
        with core.runner.device.sync_guard.allow("build"):
            rows = [cache.cpu() for cache in caches]
            # No gap: all that was computed, from the beginning.
            assert drafting.draft_start.cpu()[: len(requests)].tolist() == [0] * len(requests)
            assert torch.equal(drafting.draft_end.cpu(), drafting.num_computed.cpu())
        return [torch.stack([cache[pages[i]][:, :, :num_kept] for i in sorted(pages)]) for cache in rows]

    for own, theirs in zip(kept(0), kept(3), strict=True):
        size = min(own.shape[3], theirs.shape[3])
        assert size > 12
        torch.testing.assert_close(own[:, :, :, :size], theirs[:, :, :, :size], rtol=1e-9, atol=1e-9)


def test_what_is_recorded_later_writes_no_old_notes(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a request that was noted have gone to another one, who is cached; then graphs are recorded."""
    folder, speculative = written("eagle3")
    monkeypatch.setattr(build, "decide_draft_length", lambda _config, _backend: (FixedLength(0), None))
    config = {**speculative, "num_speculative_tokens": 3, "adaptive": True}
    where = {**IN_GRAPHS, "cudagraph_capture_sizes": (1, 2, 4, 32, 80)}
    options = {"max_num_seqs": 4, "block_size": 8, "num_gpu_blocks_override": 9, **where}
    core = maker(folder)(speculative_config=config, **options).core
    graphs, device, speculator = core.runner.graphs, core.runner.device, core.runner.speculator
    assert isinstance(speculator, EagleSpeculator)
    follower = speculator.follower
    assert isinstance(follower, HeadFollower)

    def leaves_notes(desc: BatchExecutionDescriptor) -> bool:
        return desc.tier == "fast" and not desc.num_drafts and follower.leaves_notes(desc)

    def are_missing(*num_reqs: int) -> bool:
        missing = {desc.num_reqs for desc in graphs.manager._missing if leaves_notes(desc)}
        return not missing.isdisjoint(num_reqs)

    def kept() -> list[torch.Tensor]:
        with device.use_stream(device.compute_stream), torch.inference_mode():
            follower.catch_up()
        with device.sync_guard.allow("build"):
            return [
                cache.cpu().clone()[:-1] for cache in speculator.caches.paged_memory()
            ]  # without the last page, which is never read

    while are_missing(4):
        core.use_idle_time()
    assert are_missing(1, 2)
    for request in (make_request("noted", [5, 6, 7, 8], 20), make_request("cached", list(range(10, 65)), 1)):
        core.add(request)
        while core.has_work:
            core.step()
        before = kept()
    while are_missing(1, 2):
        core.use_idle_time()
    for own, expected in zip(kept(), before, strict=True):
        assert torch.equal(own, expected)
