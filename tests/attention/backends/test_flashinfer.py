"""The FlashInfer backend without FlashInfer and without a GPU.

It runs on the simulated device, with a library that computes from exactly what it is given, so that a wrong, stale or
missing argument is a wrong result or an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.backends import flashinfer
from slipstream.attention.backends.flashinfer import ExactLengthsError, FlashInferBackend, FlashInferMetadata, Part
from slipstream.attention.backends.flashinfer_paths import Needs, Paths
from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.sim import SimDevice, StaleReadError
from slipstream.device.sync_guard import HostSyncError
from tests.attention.backends.fake_flashinfer import FakeLibrary, paths_of
from tests.device.sim_setup import upload

PAGE, HEADS, KV_HEADS, DIM, MAX_REQS = 4, 4, 2, 8, 8
MAX_LEN = 48  # a multiple of the page size: no table entry is past the context limit
MAX_PAGES, NUM_PAGES = MAX_LEN // PAGE, MAX_REQS * MAX_LEN // PAGE + 2
DEVICE_TENSORS = ("query_start_loc", "query_lens", "seq_lens", "block_table", "slot_mapping")


# --- batches --------------------------------------------------------------------------------------


class Row(NamedTuple):
    start: int  # tokens before the step
    planned: int  # query tokens, unused draft slots included
    alive: int  # 0: the row has stopped

    @property
    def seq_len(self) -> int:
        return self.start + self.alive if self.alive else 0


@dataclass
class Batch:
    common: CommonAttentionMetadata  # of the host
    kv_cache: Tensor
    q: Tensor

    def expected(self, layer: AttentionLayer) -> Tensor:
        backend = ReferenceBackend()
        num_reqs = self.common.num_reqs
        cut = {name: getattr(self.common, name)[:num_reqs] for name in ("query_lens", "seq_lens", "block_table")}
        start_loc = self.common.query_start_loc[: num_reqs + 1]
        return backend.run(layer, self.q, self.kv_cache, replace(self.common, query_start_loc=start_loc, **cut))

    def exact(self, num_computed: list[int], num_common_pages: int = 0) -> Batch:
        computed = np.array(num_computed, dtype=np.int32)
        return replace(self, common=replace(self.common, num_computed_cpu=computed, num_common_pages=num_common_pages))


def make_batch(rows: list[Row], slack: int = 0, num_common: int = 0, padding: int = 0, seed: int = 0) -> Batch:
    """Bounds of decodes are ``slack`` above the truth. What no living token may see is NaN."""
    rng = torch.Generator().manual_seed(seed)
    num_reqs, starts = len(rows), np.cumsum([0, *(row.planned for row in rows)]).astype(np.int32)
    num_tokens = int(starts[-1])
    bounds = [min(row.start + row.planned + (slack if row.planned <= 4 else 0), MAX_LEN) for row in rows]
    ids = 1 + torch.randperm(NUM_PAGES - 2, generator=rng)
    table = torch.zeros(num_reqs, MAX_PAGES, dtype=torch.int32)
    kv_cache = torch.randn(NUM_PAGES, 2, KV_HEADS, PAGE, DIM, dtype=torch.float64, generator=rng)
    kv_cache[0] = 0.0
    for i, row in enumerate(rows):
        reserved = -(-min(row.start + row.planned, MAX_LEN) // PAGE)
        table[i, :reserved] = ids[i * MAX_PAGES : i * MAX_PAGES + reserved]
        table[i, :num_common] = table[0, :num_common]
        for slot in range(row.seq_len, reserved * PAGE):
            if slot >= num_common * PAGE:
                kv_cache[table[i, slot // PAGE], :, :, slot % PAGE] = torch.nan
    common = CommonAttentionMetadata(
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=max(row.planned for row in rows),
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_cpu=starts,
        query_lens=torch.tensor([row.alive for row in rows], dtype=torch.int32),
        seq_lens=torch.tensor([row.seq_len for row in rows], dtype=torch.int32),
        seq_lens_cpu_upper_bound=np.array(bounds, dtype=np.int32),
        block_table=table,
        slot_mapping=torch.zeros(num_tokens + padding, dtype=torch.int64),
    )
    q = torch.randn(num_tokens + padding, HEADS, DIM, dtype=torch.float64, generator=rng)
    return Batch(common, kv_cache, q)


def draw_rows(seed: int, query_len: int, shape: str, first: int = 0, may_stop: bool = False) -> list[Row]:
    """Decodes, one of them at the context limit and one just begun, and then prefills."""
    rng = np.random.default_rng(seed)
    decodes = [Row(MAX_LEN - 1, query_len, 1), Row(max(first, 1), query_len, 1)]
    decodes += [Row(int(rng.integers(first, 40)), query_len, int(rng.integers(1, query_len + 1))) for _ in range(2)]
    if may_stop:
        decodes[3] = Row(9, query_len, 0)
    prefills = [Row(int(rng.integers(first, 30)), n, n) for n in rng.integers(5, 14, size=3).tolist()]
    return {"mixed": decodes + prefills, "decodes": decodes, "prefills": prefills}[shape]


class Bench:
    """A backend on a device of its own; the guard forbids every wait, and step buffers are poisoned."""

    def __init__(self, paths: Paths, seed: int = 0) -> None:
        self.device = SimDevice(seed)
        self.library = FakeLibrary(paths.decode.path)
        self.backend = FlashInferBackend(paths, self.library, PAGE, MAX_REQS, (1, 4), self.device.torch_device)

    def on_device(self, batch: Batch) -> CommonAttentionMetadata:
        return replace(batch.common, **{n: upload(self.device, getattr(batch.common, n)) for n in DEVICE_TENSORS})

    def build(self, batch: Batch, poison: bool = True) -> FlashInferMetadata:
        if poison:
            for buffer in self.backend.step_buffers():
                self.device.poison(buffer)
        with self.device.sync_guard.forbid():
            return self.backend.build(self.on_device(batch))

    def run(self, layer: AttentionLayer, batch: Batch, metadata: FlashInferMetadata) -> Tensor:
        q, kv_cache = upload(self.device, batch.q), upload(self.device, batch.kv_cache)
        with self.device.sync_guard.forbid():
            out = self.backend.run(layer, q, kv_cache, metadata)
        return self.device.peek(out)


def layer(window: int = 0, idx: int = 0) -> AttentionLayer:
    return AttentionLayer(idx, HEADS, KV_HEADS, DIM, 0.3, window)


def assert_right(bench: Bench, batch: Batch, window: int = 0, poison: bool = True) -> FlashInferMetadata:
    metadata = bench.build(batch, poison)
    out = bench.run(layer(window), batch, metadata)
    torch.testing.assert_close(out, batch.expected(layer(window)), rtol=1e-9, atol=1e-9)
    return metadata


# --- every combination ----------------------------------------------------------------------------

PREFILL, DECODE = ("native", "trtllm"), ("native", "trtllm", "xqa")
FIELDS = {"key_lens", "block_table", "mask", "query_starts", "paged_kv_indptr", "pages"}
READ = {
    ("decode", "native"): {"pages"},
    ("decode", "trtllm"): {"key_lens", "block_table"},
    ("decode", "xqa"): {"key_lens", "block_table"},
    ("prefill", "native"): {"pages"},
    ("prefill", "trtllm"): {"key_lens", "block_table", "query_starts", "paged_kv_indptr"},
}


def assert_built(part: Part, kind: str, path: str, query_len: int) -> None:
    read = set(READ[kind, path])
    if path == "xqa" and query_len > 1:
        read.add("mask")
    assert part.path == path
    assert {name for name in FIELDS if getattr(part, name) is not None} == read


@pytest.mark.parametrize("shape", ["mixed", "decodes", "prefills"])
@pytest.mark.parametrize("query_len", [1, 4], ids=["plain", "drafts"])
@pytest.mark.parametrize("parallel", [False, True], ids=["", "parallel"])
@pytest.mark.parametrize("cascade", [False, True], ids=["", "cascade"])
@pytest.mark.parametrize("decode", DECODE)
@pytest.mark.parametrize("prefill", PREFILL)
def test_every_batch(prefill: str, decode: str, cascade: bool, parallel: bool, query_len: int, shape: str) -> None:
    bench = Bench(paths_of(prefill, decode, parallel))
    num_common = 2 if cascade else 0
    rows = draw_rows(3, query_len, shape, first=num_common * PAGE)
    has_decodes, has_prefills = shape != "prefills", shape != "decodes"
    is_native = (has_decodes and decode == "native") or (has_prefills and prefill == "native")
    batch = make_batch(rows, slack=0 if is_native else 3, num_common=num_common, padding=5)
    if is_native or parallel:
        with pytest.raises(ExactLengthsError):
            bench.build(batch)
    if is_native or parallel or cascade:
        batch = batch.exact([row.start for row in rows], num_common)
    metadata = assert_right(bench, batch)
    if not (is_native or parallel or cascade):
        assert metadata.seq_lens_cpu is None
    else:
        assert metadata.seq_lens_cpu is not None
        assert metadata.seq_lens_cpu.tolist() == [row.start + row.planned for row in rows]
    if cascade:
        assert metadata.decode is None and metadata.prefill is None and metadata.cascade is not None
        assert bench.library.calls == ["plan_cascade"]
        return
    assert metadata.cascade is None
    assert (metadata.decode is not None, metadata.prefill is not None) == (has_decodes, has_prefills)
    if metadata.decode is not None:
        assert_built(metadata.decode, "decode", decode, query_len)
        assert metadata.decode.tokens == slice(0, 4 * query_len)
    if metadata.prefill is not None:
        assert_built(metadata.prefill, "prefill", prefill, 0)
    assert (len(bench.library.calls) > 0) is is_native


@pytest.mark.parametrize("kind", ["decodes", "mixed"])
@pytest.mark.parametrize("query_len", [1, 4], ids=["plain", "drafts"])
@pytest.mark.parametrize("decode", DECODE)
@pytest.mark.parametrize("prefill", PREFILL)
def test_a_dummy_run(prefill: str, decode: str, query_len: int, kind: str) -> None:
    """As for a warm-up: no request runs, and the host's numbers are the maximum."""
    num_reqs, num_tokens = 4, 4 * query_len if kind == "decodes" else 11
    starts = np.minimum(np.arange(num_reqs + 1, dtype=np.int32) * (query_len if kind == "decodes" else 1), num_tokens)
    starts[-1] = num_tokens
    zeros = torch.zeros(num_reqs + 1, dtype=torch.int32)
    common = CommonAttentionMetadata(
        *(num_reqs, num_tokens, query_len if kind == "decodes" else num_tokens, zeros, starts),
        *(zeros[:num_reqs], zeros[:num_reqs], np.full(num_reqs, MAX_LEN, dtype=np.int32)),
        torch.zeros(num_reqs, MAX_PAGES, dtype=torch.int32),
        torch.full((num_tokens,), -1, dtype=torch.int64),
    )
    kv_cache = torch.zeros(2, 2, KV_HEADS, PAGE, DIM, dtype=torch.float64)
    batch = Batch(common, kv_cache, torch.randn(num_tokens, HEADS, DIM, dtype=torch.float64)).exact([0] * num_reqs)
    bench = Bench(paths_of(prefill, decode))
    assert torch.equal(bench.run(layer(), batch, bench.build(batch)), torch.zeros_like(batch.q))


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("prefill", "decode"), [("trtllm", "trtllm"), ("trtllm", "xqa"), ("native", "native")])
def test_random_batches_one_after_another(prefill: str, decode: str, seed: int, window: int) -> None:
    """On one backend, so that what a step leaves in its buffers can corrupt the next."""
    rng, bench = np.random.default_rng(seed), Bench(paths_of(prefill, decode), seed)
    for step in range(4):
        query_len = 1 if window and decode == "xqa" else int(rng.choice([1, 4]))
        shape = str(rng.choice(["mixed", "mixed", "decodes", "prefills"]))
        is_native = prefill == "native"
        rows = draw_rows(10 * seed + step, query_len, shape, may_stop=not is_native)
        batch = make_batch(rows, slack=0 if is_native else 2, padding=int(rng.integers(0, 4)), seed=seed)
        if is_native:
            batch = batch.exact([row.start for row in rows])
        assert_right(bench, batch, window)


def test_layers_share_plans_by_shape() -> None:
    rows = draw_rows(0, 1, "mixed")
    batch, bench = make_batch(rows).exact([row.start for row in rows]), Bench(paths_of("native", "native"))
    metadata = bench.build(batch)
    for idx, window in enumerate((0, 7, 0, 7)):
        out = bench.run(layer(window, idx), batch, metadata)
        torch.testing.assert_close(out, batch.expected(layer(window)), rtol=1e-9, atol=1e-9)
    assert bench.library.calls == ["plan_decode", "plan_prefill"] * 2


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("decode", ["trtllm", "xqa"])
def test_decodes_are_recorded_once_for_all_lengths(decode: str, query_len: int) -> None:
    bench = Bench(paths_of("trtllm", decode))
    device, backend = bench.device, bench.backend
    batches = [make_batch(draw_rows(seed, query_len, "decodes"), seed=1) for seed in range(3)]
    static = replace(batches[0].common, seq_lens_cpu_upper_bound=np.full(4, MAX_LEN, dtype=np.int32))
    common = bench.on_device(replace(batches[0], common=static))
    q, kv_cache = upload(device, batches[0].q), upload(device, batches[0].kv_cache)
    with device.record(device.graph_pool()) as capture, device.sync_guard.forbid():
        out = backend.run(layer(), q, kv_cache, backend.build(common))
    assert capture.graph is not None
    for batch in batches:
        for buffer in backend.step_buffers():
            device.poison(buffer)
        for name in DEVICE_TENSORS:
            getattr(common, name).copy_(upload(device, getattr(batch.common, name)))
        q.copy_(upload(device, batch.q))
        kv_cache.copy_(upload(device, batch.kv_cache))
        capture.graph.replay()
        torch.testing.assert_close(device.peek(out), batch.expected(layer()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("decode", DECODE)
@pytest.mark.parametrize("prefill", PREFILL)
def test_pages_of_who_had_the_row_before(prefill: str, decode: str) -> None:
    """After a request's own pages its table may name any page. Slots of unused drafts there must not be written."""
    rows = [Row(11, 4, 2), Row(7, 4, 1), Row(2, 4, 2), Row(3, 7, 7)]
    batch = make_batch(rows).exact([row.start for row in rows])
    table, strange = batch.common.block_table, NUM_PAGES - 2
    for i, row in enumerate(rows):
        table[i, -(-row.seq_len // PAGE) :] = table[0, 1] if i % 2 else strange
    batch.kv_cache[strange] = torch.nan
    bench = Bench(paths_of(prefill, decode))
    kept, before = table[0, 1].item(), batch.kv_cache.clone()
    q, kv_cache = upload(bench.device, batch.q), upload(bench.device, batch.kv_cache)
    out = bench.backend.run(layer(), q, kv_cache, bench.build(batch))
    torch.testing.assert_close(bench.device.peek(out), batch.expected(layer()), rtol=1e-9, atol=1e-9)
    for page in (0, kept, strange):
        assert torch.equal(bench.device.peek(kv_cache)[page].nan_to_num(7.0), before[page].nan_to_num(7.0))


@pytest.mark.parametrize("decode", ["trtllm", "xqa"])
@pytest.mark.parametrize("prefill", [[], [Row(3, 7, 7)]], ids=["decodes", "mixed"])
def test_rows_that_have_stopped_clear_no_keys(prefill: list[Row], decode: str) -> None:
    """Their tables may name pages of those that go on: of a common prefix, or of who has been given them since."""
    rows = [Row(11, 4, 2), Row(9, 4, 0), Row(1, 4, 0), *prefill]
    batch = make_batch(rows)
    table = batch.common.block_table
    table[1] = table[0]
    table[2] = table[0].flip(0)
    bench = Bench(paths_of("trtllm", decode))
    q, kv_cache = upload(bench.device, batch.q), upload(bench.device, batch.kv_cache)
    out = bench.backend.run(layer(), q, kv_cache, bench.build(batch))
    torch.testing.assert_close(bench.device.peek(out), batch.expected(layer()), rtol=1e-9, atol=1e-9)
    after = bench.device.peek(kv_cache)
    for i, row in enumerate(rows):
        for slot in range(row.seq_len):
            at = (table[i, slot // PAGE], slice(None), slice(None), slot % PAGE)
            assert torch.equal(after[at], batch.kv_cache[at])


def test_sequences_that_start_later_are_refused() -> None:
    bench, batch = Bench(paths_of("trtllm", "trtllm")), make_batch(draw_rows(0, 1, "decodes"))
    starts = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="reads every slot of a sequence"):
        bench.build(replace(batch, common=replace(batch.common, seq_starts=starts)))
    with pytest.raises(RuntimeError, match="reads every slot of a sequence"):
        bench.backend.starting_at(bench.build(batch), starts)


def test_what_the_engine_reads() -> None:
    for prefill, decode, exact in (
        *(("native", "native", "always"), ("native", "xqa", "prefill")),
        *(("trtllm", "trtllm", "never"), ("trtllm", "native", "always")),
    ):
        backend = Bench(paths_of(prefill, decode)).backend
        assert backend.exact_lengths == exact
        assert backend.caps.host_lengths == ("none" if exact == "never" else "exact")
        assert backend.caps.graph_support == ("never" if decode == "native" else "decode")


# --- faults of a real engine, planted in this builder ----------------------------------------------


def mixed(native: bool = False) -> Batch:
    rows = draw_rows(5, 4, "mixed")
    batch = make_batch(rows, slack=0 if native else 2)
    return batch.exact([row.start for row in rows]) if native else batch


@pytest.mark.parametrize("decode", ["trtllm", "xqa"])
def test_a_guard_that_looks_at_decodes_alone_wants_host_lengths(monkeypatch: pytest.MonkeyPatch, decode: str) -> None:
    """Report 000: a mixed batch in which nothing plans on the host is held to need the host's lengths."""

    def only_trtllm_decode(
        paths: Paths, num_prefills: int, num_decodes: int, cascade: bool = False, context_parallel: bool = False
    ) -> Needs:
        only = num_prefills == 0 and paths.decode.is_trtllm
        return Needs(only, context_parallel or cascade or not only, cascade or not only)

    bench = Bench(paths_of("trtllm", decode))
    assert_right(bench, mixed())
    monkeypatch.setattr(flashinfer, "needs_of", only_trtllm_decode)
    assert_right(bench, make_batch(draw_rows(5, 4, "decodes")))  # where the bug is not visible
    with pytest.raises(ExactLengthsError):
        bench.build(mixed())


def test_a_guard_that_looks_at_decodes_alone_forgets_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: decodes that need nothing speak for prefills that do."""

    def decode_alone(
        paths: Paths, num_prefills: int, num_decodes: int, cascade: bool = False, context_parallel: bool = False
    ) -> Needs:
        return Needs(paths.decode.is_trtllm, not paths.decode.is_trtllm, not paths.decode.is_trtllm)

    bench = Bench(paths_of("native", "xqa"))
    assert_right(bench, mixed(native=True))
    monkeypatch.setattr(flashinfer, "needs_of", decode_alone)
    with pytest.raises(AssertionError, match="planning needs exact lengths"):
        bench.build(mixed(native=True))


def stale(self: FlashInferBackend, key_lens: Tensor) -> Tensor:
    return self._paged_kv_indptr[: key_lens.shape[0] + 1]


def first_not_zeroed(self: FlashInferBackend, key_lens: Tensor) -> Tensor:
    indptr = stale(self, key_lens)
    torch.cumsum((key_lens + (PAGE - 1)) // PAGE, dim=0, dtype=torch.int32, out=indptr[1:])
    return indptr


def from_the_host(self: FlashInferBackend, key_lens: Tensor) -> Tensor:
    indptr = stale(self, key_lens)
    indptr[1:].copy_((key_lens.cpu() + (PAGE - 1)) // PAGE)
    return indptr


@pytest.mark.parametrize("faulty", [stale, first_not_zeroed])
@pytest.mark.parametrize("decode", ["trtllm", "xqa"])
def test_page_counts_of_the_step_before(monkeypatch: pytest.MonkeyPatch, decode: str, faulty: Any) -> None:
    """Report 000: trtllm prefill reads the index array, and on its path nothing fills it."""
    bench = Bench(paths_of("trtllm", decode))
    assert_right(bench, mixed())
    monkeypatch.setattr(FlashInferBackend, "_cumulate_pages", faulty)
    with pytest.raises(StaleReadError):
        assert_right(bench, mixed())


def test_page_counts_of_the_step_before_are_wrong_results_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(paths_of("trtllm", "trtllm"))
    assert_right(bench, make_batch(draw_rows(6, 4, "mixed")))
    monkeypatch.setattr(FlashInferBackend, "_cumulate_pages", stale)
    with pytest.raises(AssertionError):
        assert_right(bench, mixed(), poison=False)


def test_page_counts_by_way_of_the_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashInferBackend, "_cumulate_pages", from_the_host)
    with pytest.raises(HostSyncError):
        Bench(paths_of("trtllm", "trtllm")).build(mixed())


def test_plans_from_bounds_would_be_wrong_results() -> None:
    """Why a bound will not do: a batch that only says it is exact gives something else."""
    rows = draw_rows(5, 1, "mixed")
    batch = make_batch(rows).exact([row.start + (i == 2) for i, row in enumerate(rows)])
    with pytest.raises(AssertionError):
        assert_right(Bench(paths_of("native", "native")), batch)
