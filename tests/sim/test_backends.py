"""Whole engines through every backend's own builder: with any drafter the tokens are those of plain decoding.

Prompts come in chunks while others decode, find pages of those before, and lose their own; two steps are in flight. The
expected tokens are the definition's, on the CPU, in float64, as all backends run here: rounding explains nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.attention.backends.flashinfer import FlashInferBackend
from slipstream.attention.backends.triton import TritonBackend, TritonMetadata
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.sim import DeviceFaultError
from slipstream.graphs.mode import CUDAGraphMode
from tests.sim.tiny_engines import (
    BACKENDS,
    FLASHINFER,
    METHODS,
    Arrival,
    Folders,
    K,
    Launch,
    Watched,
    arrivals,
    decoding,
    expected,
    run,
    shortened,
    watch,
    write,
)

M = CUDAGraphMode
# With every graph that the backend allows: which the target's passes with and without prompts then run in.
MODES = {
    "reference": (M.FULL, M.FULL),
    "triton": (M.FULL, M.FULL),
    "flex": (M.PIECEWISE, M.PIECEWISE),
    "native": (M.PIECEWISE, M.PIECEWISE),
    "native-xqa": (M.PIECEWISE, M.FULL),
    "trtllm": (M.PIECEWISE, M.FULL),
}
WITHOUT_DRAINS = [name for name, paths in FLASHINFER.items() if paths.exact_lengths != "always"]
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Tokens:
    return expected(folders, [*arrivals(20), *decoding()])


def check(plain: Tokens, watched: Watched, requests: list[Arrival]) -> None:
    found = run(watched.engine, requests)
    assert found == {name: plain[name] for name in found}
    if watched.engine.config.speculative is not None:
        stats = watched.engine.core.stats
        assert stats.num_draft_tokens > 30 and stats.num_accepted_tokens > 2, (
            "drafts that are never accepted prove little"
        )


def check_mixed(monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens, case: tuple[str, str, int]) -> None:
    backend, method, count = case
    watched = watch(monkeypatch, folders, backend, method)
    check(plain, watched, arrivals(count))
    stats = watched.engine.core.stats
    assert stats.num_preemptions > 0 and stats.num_cached_tokens > 0
    assert watched.num_mixed >= 6
    with_prompts, without = MODES[backend]
    assert set(watched.modes(with_prompts=True)) == {with_prompts}
    # A prompt of which as many tokens are left as a decode has looks like one, and may run as one.
    assert watched.modes(with_prompts=False)[without] > 0.8 * watched.modes(with_prompts=False).total()
    if backend in FLASHINFER:
        check_plans(backend, watched.launches)
        assert stats.num_drains > 0 or FLASHINFER[backend].exact_lengths == "never"


def check_plans(backend: str, launches: list[Launch]) -> None:
    """A step whose attention plans on the host is launched alone; the others run ahead."""
    exact = FLASHINFER[backend].exact_lengths
    planned = [launch for launch in launches if launch.num_plans]
    assert all(launch.num_before == 0 for launch in planned)
    if exact == "always":
        assert planned == launches
        return
    assert max(launch.num_before for launch in launches if not launch.num_plans) == 1
    # Of prompts some have as many tokens as a decode and go its way.
    assert len(planned) >= 6 if exact == "prefill" else not planned
    assert all(launch.has_prompts for launch in planned)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "flex"])
def test_the_same_tokens_as_plain(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens, backend: str, method: str
) -> None:
    check_mixed(monkeypatch, folders, plain, (backend, method, 7))


def test_the_same_tokens_as_plain_through_flex(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens
) -> None:
    """Few tokens: its mask is asked about every pair of token and key, one operator at a time.

    N-gram drafts are in ``tests/attention/backends/test_flex.py``, all methods in the long matrix below.
    """
    watched = watch(monkeypatch, folders, "flex", "eagle3")
    found = run(watched.engine, shortened(arrivals(3), 4))
    assert found == {name: plain[name][:4] for name in found}
    assert watched.num_mixed >= 2 and watched.num_target_replays == len(watched.launches)
    assert watched.engine.core.stats.num_draft_tokens > 0


@pytest.mark.parametrize("method", ["none", "eagle3"])
@pytest.mark.parametrize("mode", ["none", "piecewise"])
def test_prompts_and_decodes_attend_apart_where_the_host_knows_them(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens, mode: str, method: str
) -> None:
    """Launch by launch and in pieces; not in graphs of all of a step, which serve batches of any kinds."""
    watched = watch(monkeypatch, folders, "triton", method, cudagraph_mode=mode, mixed_attention="apart")
    found: list[TritonMetadata] = []
    build = TritonBackend.build

    def build_and_note(self: TritonBackend, common: CommonAttentionMetadata) -> TritonMetadata:
        found.append(build(self, common))
        return found[-1]

    monkeypatch.setattr(TritonBackend, "build", build_and_note)
    check(plain, watched, arrivals())
    apart = [metadata.parts for metadata in found if metadata.parts is not None]
    assert len(apart) >= 4
    assert {parts.query_len for parts in apart} == ({1} if method == "none" else {1 + K})


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_twenty_requests(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens, backend: str, method: str
) -> None:
    check_mixed(monkeypatch, folders, plain, (backend, method, 20))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", WITHOUT_DRAINS)
def test_decodes_never_drain(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens, backend: str, method: str
) -> None:
    """After the last prompt nothing waits, in XQA and in TRT-LLM; every step but the first finds one in flight."""
    watched = watch(monkeypatch, folders, backend, method, record_all=False, num_gpu_blocks_override=60)
    check(plain, watched, decoding())
    later = [launch for launch in watched.launches if not launch.has_prompts]
    assert len(later) > 6
    assert all(launch.num_before == 1 and launch.num_plans == 0 and launch.mode is M.FULL for launch in later)
    assert later[-1].num_drains == later[0].num_drains
    assert FLASHINFER[backend].exact_lengths != "never" or watched.engine.core.stats.num_drains == 0


def test_native_decodes_drain_every_step(monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens) -> None:
    watched = watch(monkeypatch, folders, "native", "ngram", record_all=False, num_gpu_blocks_override=60)
    check(plain, watched, decoding())
    check_plans("native", watched.launches)
    assert watched.engine.core.stats.num_drains >= len(watched.launches) - 1


# --- planted faults -----------------------------------------------------------------------------------


def test_a_builder_that_takes_padding_for_tokens_is_found(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens
) -> None:
    right = FlashInferBackend.build

    def padded(self: FlashInferBackend, common: CommonAttentionMetadata) -> Any:
        return right(self, replace(common, num_actual_tokens=common.slot_mapping.shape[0]))

    monkeypatch.setattr(FlashInferBackend, "build", padded)
    with pytest.raises(DeviceFaultError, match="flashinfer_planned"):
        check_mixed(monkeypatch, folders, plain, ("native", "ngram", 7))


def test_a_builder_that_finds_decodes_by_the_padding_is_found(
    monkeypatch: pytest.MonkeyPatch, folders: Folders, plain: Tokens
) -> None:
    """A mixed batch padded to 20 tokens of 4 requests, the longest of which has 5: it only happens to add up."""

    def by_padding(self: TritonBackend, common: CommonAttentionMetadata) -> TritonMetadata:
        is_uniform = common.seq_lens.shape[0] * common.max_query_len == common.slot_mapping.shape[0]
        return TritonMetadata(common, common.max_query_len if is_uniform else 0)

    options = {"cudagraph_mode": "piecewise", "long_prefill_token_threshold": 5}
    requests = arrivals(4)
    expected = {arrival.request.request_id: plain[arrival.request.request_id] for arrival in requests}
    with monkeypatch.context() as patch:
        assert run(watch(patch, folders, "triton", "ngram", **options).engine, requests) == expected
    monkeypatch.setattr(TritonBackend, "build", by_padding)
    assert run(watch(monkeypatch, folders, "triton", "ngram", **options).engine, requests) != expected
