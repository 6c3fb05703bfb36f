"""Nine ways in which real engines went wrong, planted in this one: each must be found, and the right variant must pass.

The first five are the failures that the laws at the heart of the architecture came from. `docs/laws.md` says which test
stands for which law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionBackend, AttentionLayer, Caps
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.device.operation import operation
from slipstream.device.sim import CaptureError, DeviceFaultError, RaceError, SimDevice, SimError, StaleReadError
from slipstream.device.sync_guard import HostSyncError
from slipstream.graphs.descriptor import AttentionState, BatchExecutionDescriptor
from slipstream.graphs.manager import CudaGraphManager, Forward
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.plan import StepPlan
from slipstream.runner.async_output import Channel, InFlightStep, OutputRing, StepOutput
from slipstream.runner.batch import BatchPreparer
from slipstream.runner.request_state import RequestRows
from slipstream.runner.rings import Ring
from slipstream.runner.staging import _StagingSlot
from tests.sim.hash_model import HashBackend, hash_attention
from tests.sim.world import World

SEEDS = range(3)
# A graph larger than any batch, so that every step is padded.
PADDED = {"cudagraph_mode": "full", "cudagraph_capture_sizes": (48,), "max_num_batched_tokens": 48, "max_num_seqs": 6}
# The backends planted there know nothing of common pages.
MIXED = {
    "long_prefill_token_threshold": 8,
    "max_num_batched_tokens": 16,
    "speculative_config": None,
    "cascade": "never",
}
DRAFTED = {**MIXED, "max_num_batched_tokens": 36, "speculative_config": {"method": "ngram"}, "max_num_seqs": 4}
MakeBackend = Callable[[EngineConfig, SimDevice], AttentionBackend]


def faults_found(
    make_backend: MakeBackend | None = None,
    events: Iterable[str] = (),
    seeds: Iterable[int] = SEEDS,
    **overrides: Any,
) -> list[Exception | None]:
    """What each seed says of the engine as it is now."""
    overrides = {"steps_in_flight": 3, "cudagraph_mode": "none", **overrides}
    backend = {} if make_backend is None else {"make_backend": make_backend}
    found: list[Exception | None] = []
    for seed in seeds:
        try:
            # A step in halves, or with grammars, hides some of the faults in some of the seeds.
            kinds = {"is_split": False, "is_constrained": False}
            World(seed, overrides, frozenset(events), max_turns=400, **kinds, **backend).run()
        except (SimError, HostSyncError, AssertionError) as error:
            found.append(error)
        else:
            found.append(None)
    return found


def assert_found(found: list[Exception | None], *kinds: type[Exception], seeds: int = len(SEEDS)) -> None:
    assert sum(isinstance(error, kinds) for error in found) >= seeds, found


def assert_right(found: list[Exception | None]) -> None:
    assert found == [None] * len(SEEDS)


# --- 1: an index array that only some paths fill, and a guard that looks at decodes only -------------


@operation(like="q")
def indptr_attention(
    q: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    indptr: Tensor,  # [num_reqs + 1] int32: where each request's pages begin, all requests in a row
    layer_idx: int,
) -> Tensor:
    """As many keys as the pages of the index array hold, which is what a kernel without lengths would read."""
    page_size = kv_cache.shape[3]
    held = indptr.diff() * page_size
    if (held < seq_lens).any() or (held >= seq_lens + page_size).any():
        raise ValueError("the index array belongs to another batch")
    tables = (query_start_loc, query_lens, seq_lens, block_table)
    out: Tensor = hash_attention.body(q, kv_cache, *tables, 1 << 30, 1 << 30, layer_idx)
    return out


class IndptrBackend:
    """In the manner of FlashInfer: `paged_kv_indptr` lives in the builder and is filled step by step."""

    caps: ClassVar[Caps] = Caps(dtypes=("float64",), host_lengths="none", graph_support="never")

    def __init__(self, config: EngineConfig, device: SimDevice, guard: str) -> None:
        self._guard = guard
        self._page_size = config.cache.page_size
        self._indptr = torch.zeros(config.scheduler.max_num_seqs + 1, dtype=torch.int32, device=device.torch_device)

    def step_buffers(self) -> tuple[Tensor, ...]:
        return (self._indptr,)

    def build(self, common: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, Tensor]:
        decodes_only = common.max_query_len == 1
        indptr = self._indptr[: common.seq_lens.shape[0] + 1]
        if self._guard == "host lengths unless decodes only" and not decodes_only:
            num_pages = -(-common.seq_lens.cpu() // self._page_size)
            indptr[1:].copy_(num_pages.cumsum(0))
        elif self._guard != "decodes only" or decodes_only:
            num_pages = (common.seq_lens + (self._page_size - 1)) // self._page_size
            indptr[:1].zero_()
            torch.cumsum(num_pages, dim=0, dtype=torch.int32, out=indptr[1:])
        return common, indptr

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        common, indptr = metadata
        tables = (common.query_start_loc, common.query_lens, common.seq_lens, common.block_table)
        return indptr_attention(q, kv_cache, *tables, indptr, layer.idx)


def indptr_backend(guard: str) -> MakeBackend:
    return lambda config, device: IndptrBackend(config, device, guard)


def test_1_an_index_array_of_the_step_before() -> None:
    assert_found(faults_found(indptr_backend("decodes only"), **MIXED), StaleReadError)
    assert_found(faults_found(indptr_backend("decodes only"), **DRAFTED), StaleReadError)
    assert_right(faults_found(indptr_backend("every path"), **MIXED))
    assert_right(faults_found(indptr_backend("every path"), **DRAFTED))


def test_1_a_guard_that_looks_at_decodes_only_waits_in_mixed_batches() -> None:
    assert_found(faults_found(indptr_backend("host lengths unless decodes only"), **MIXED), HostSyncError)


# --- 2: draft decoding in pieces, tokens padded and requests not; last_token_indices not padded --------


@operation(writes=("seq_lens", "last_token_indices"))
def prepare_drafts(
    num_computed: Tensor,  # [num_reqs] int32
    seq_lens: Tensor,
    last_token_indices: Tensor,
) -> None:
    n = num_computed.shape[0]
    seq_lens[:n] = num_computed + 1
    last_token_indices[:n] = torch.arange(n)
    seq_lens[n:] = 0
    last_token_indices[n:] = 0


@operation(like="hidden")
def draft_attention(
    hidden: Tensor,  # [num_tokens] float32
    seq_lens: Tensor,  # [num_reqs] int32; a decode has one token a request
) -> Tensor:
    return hidden * seq_lens.float()


def draft_decode(padded_tokens: int, padded_reqs: int, seed: int) -> Tensor:
    """Three drafting requests through a graph recorded for eight tokens."""
    device, num_reqs, size = SimDevice(seed), 3, 8
    torch_device = device.torch_device
    seq_lens = torch.zeros(size, dtype=torch.int32, device=torch_device)
    last_token_indices = torch.zeros(size, dtype=torch.int64, device=torch_device)
    hidden = torch.ones(size, device=torch_device)
    num_computed = torch.full((num_reqs,), 4, dtype=torch.int32, device=torch_device)
    with device.record(device.graph_pool()) as capture:
        attended = draft_attention(hidden[:padded_tokens], seq_lens[:padded_tokens])
        picked = attended.index_select(0, last_token_indices[:padded_tokens])
    assert capture.graph is not None
    for buffer in (seq_lens, last_token_indices):
        device.poison(buffer)
    prepare_drafts(num_computed, seq_lens[:padded_reqs], last_token_indices[:padded_reqs])
    capture.graph.replay()
    return device.peek(picked)


@pytest.mark.parametrize("seed", SEEDS)
def test_2_tokens_padded_and_requests_not(seed: int) -> None:
    with pytest.raises(StaleReadError, match="poisoned for this step"):
        draft_decode(padded_tokens=8, padded_reqs=3, seed=seed)
    assert draft_decode(padded_tokens=8, padded_reqs=8, seed=seed).tolist() == [5.0] * 8


def test_2_drafts_are_decoded_in_full_graphs_or_none() -> None:
    for mode in CUDAGraphMode:
        assert mode.for_draft_decodes() in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)
    assert CUDAGraphMode.PIECEWISE.for_draft_decodes() is CUDAGraphMode.NONE
    assert CUDAGraphMode.FULL_AND_PIECEWISE.for_draft_decodes() is CUDAGraphMode.FULL_DECODE_ONLY
    with pytest.raises(ValueError, match="8 tokens are not 3 requests of 1"):
        BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens=8, num_reqs=3, query_len=1)


def test_2_last_token_indices_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the engine's own kernel: what is after the last request is not written."""
    from slipstream.kernels.step.prepare_inputs import prepare_inputs

    right = prepare_inputs.body

    def faulty(**arguments: Any) -> None:
        real = int(arguments["logit_start_loc"][-1])
        before = arguments["logit_indices"].clone()
        right(**arguments)
        arguments["logit_indices"][real:] = before[real:]

    assert_right(faults_found(**PADDED))
    monkeypatch.setattr(prepare_inputs, "body", faulty)
    assert_found(faults_found(**PADDED), DeviceFaultError)


# --- 3: a property that copies from the device; a bound below the truth ------------------------------


@dataclass(frozen=True)
class SneakyMetadata(CommonAttentionMetadata):
    @property
    def seq_lens_cpu(self) -> Tensor:
        return self.seq_lens.cpu()


class SneakyBackend(HashBackend):
    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        names = CommonAttentionMetadata.__dataclass_fields__
        sneaky = SneakyMetadata(**{name: getattr(common, name) for name in names})
        assert sneaky.seq_lens_cpu.max() >= 0
        return sneaky


def test_3_a_property_that_copies_lengths_to_the_host() -> None:
    found = faults_found(lambda _config, _device: SneakyBackend())
    assert_found(found, HostSyncError)
    assert "test_failures.py" in str(found[0]), "the line that did it"
    # The engine's own metadata holds no such thing: whatever is there can be read at any time.
    for name in CommonAttentionMetadata.__dataclass_fields__:
        assert not isinstance(getattr(CommonAttentionMetadata, name, None), property)


def test_3_a_bound_that_forgets_what_this_step_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BatchPreparer.prepare

    def faulty(self: BatchPreparer, plan: StepPlan) -> Any:
        batch = right(self, plan)
        batch.inputs.attention.seq_lens_cpu_upper_bound[:] -= [r.num_tokens for r in plan.requests]
        return batch

    assert_right(faults_found())
    monkeypatch.setattr(BatchPreparer, "prepare", faulty)
    assert_found(faults_found(), DeviceFaultError)


# --- 4: a device mask, and repeat_interleave without a size ------------------------------------------


class GdnBackend(HashBackend):
    """In the manner of a builder for gated delta nets, which sorts requests by kind and spreads them over tokens."""

    def __init__(self, variant: str) -> None:
        self._variant = variant

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        query_lens = common.query_start_loc.diff()
        if self._variant == "device mask":
            assert common.seq_lens[query_lens > 1].shape[0] >= 0
        elif self._variant == "no output_size":
            assert torch.repeat_interleave(query_lens).shape[0] >= 0
        else:
            # The host knows the plan's query lengths: a host mask costs nothing, and the size is known.
            prefills = np.flatnonzero(np.diff(common.query_start_loc_cpu) > 1)
            assert all(common.seq_lens[i].shape == () for i in prefills.tolist())
            spread = torch.repeat_interleave(query_lens, output_size=common.num_actual_tokens)
            assert spread.shape[0] == common.num_actual_tokens
        return common


@pytest.mark.parametrize("variant", ["device mask", "no output_size"])
def test_4_shapes_that_depend_on_values(variant: str) -> None:
    assert_found(faults_found(lambda _config, _device: GdnBackend(variant)), HostSyncError)


def test_4_shapes_that_the_host_knows() -> None:
    assert_right(faults_found(lambda _config, _device: GdnBackend("host")))


# --- 5: warm-up and capture share a state that initialises itself ------------------------------------


class LazyState(AttentionState):
    """A tile schedule made by the first run, like FlashMLA's."""

    schedule: Tensor | None = None


def capture_lazily(device: SimDevice, shared: bool) -> CudaGraphManager:
    manager = CudaGraphManager(device, CUDAGraphMode.FULL, sizes=[4], max_num_reqs=4)
    values = torch.ones(4, device=device.torch_device)
    results: dict[BatchExecutionDescriptor, Tensor] = {}
    common_state = LazyState(values)

    def create_forward(desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        state = common_state if shared else LazyState(values)

        def run() -> None:
            if state.schedule is None:
                state.schedule = torch.full((4,), 3.0, device=device.torch_device)
            results[desc] = values[: desc.num_tokens] * state.schedule[: desc.num_tokens]

        return Forward(run, state)

    states = manager.capture(create_forward, "recording")
    assert all(pair.warmup is not pair.captured for pair in states.values())
    desc = manager.dispatch(4, 4, query_len=None)
    manager.replay(desc)
    assert device.peek(results[desc]).tolist() == [3.0] * 4
    return manager


@pytest.mark.parametrize("seed", SEEDS)
def test_5_warm_up_and_capture_share_one_lazy_state(seed: int) -> None:
    with pytest.raises(CaptureError, match="which the warm-up allocated"):
        capture_lazily(SimDevice(seed), shared=True)
    capture_lazily(SimDevice(seed), shared=False)


# --- four more -------------------------------------------------------------------------------------


@contextmanager
def shallow_rings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The staging ring hands out its first slot, whatever still uses it."""
    right = Ring.acquire
    with monkeypatch.context() as patch:
        patch.setattr(
            Ring, "acquire", lambda self: self.slots[0] if isinstance(self.slots[0], _StagingSlot) else right(self)
        )
        yield


@pytest.mark.parametrize("mode", ["none", "full"])
def test_6_staging_memory_overwritten_before_the_late_copy_ran(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    # Prompts token by token: every step stages something.
    with shallow_rings(monkeypatch):
        assert_found(faults_found(cudagraph_mode=mode, long_prefill_token_threshold=1), RaceError)
    assert_right(faults_found(cudagraph_mode=mode, long_prefill_token_threshold=1))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_7_an_output_overwritten_by_the_next_step_before_it_was_copied(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The copy stream reads the step's own output, and not a copy made in stream order."""

    def skip(self: Channel, values: Tensor) -> None:
        self.on_device = values

    def send(self: Channel, device: Device, count: int) -> None:
        device.copy_async(self.pinned[:count], self.on_device[:count])

    monkeypatch.setattr(Channel, "stage", skip)
    monkeypatch.setattr(Channel, "send", send)
    # Log probabilities are copied that way: worlds in which some are requested.
    events = ("logprobs", "prompt_logprobs", "late_arrivals")
    assert_found(faults_found(events=events, seeds=(0, 1, 7), cudagraph_mode=mode), RaceError)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_7_tokens_copied_by_another_stream_than_the_step_has(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    right = OutputRing.send

    def faulty(self: OutputRing, plan: StepPlan, output: StepOutput) -> InFlightStep:
        if output.logprobs is not None or output.prompt_logprobs is not None:
            return right(self, plan, output)
        device, slot = self._device, self._ring.acquire()
        slot.computed.record(device.compute_stream)
        with device.use_stream(device.copy_stream):
            device.copy_stream.wait_event(slot.computed)
            device.copy_async(slot.tokens.first(output.tokens.shape[0])[1], output.tokens)
            slot.event.record(device.copy_stream)
        return InFlightStep(plan, slot, False, (), device.sync_guard)

    monkeypatch.setattr(OutputRing, "send", faulty)
    assert_found(faults_found(cudagraph_mode=mode), RaceError)


def test_7_an_output_slot_that_is_still_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot for all steps: what is collected is another step's."""
    right = Ring.acquire
    monkeypatch.setattr(
        Ring, "acquire", lambda self: right(self) if isinstance(self.slots[0], _StagingSlot) else self.slots[0]
    )
    assert_found(faults_found(), AssertionError, RaceError)


def test_8_an_output_read_before_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient:
        def synchronize(self) -> None:
            pass

    right = InFlightStep.collect

    def faulty(self: InFlightStep) -> Any:
        event, self.slot.event = self.slot.event, Impatient()  # type: ignore[assignment]
        try:
            return right(self)
        finally:
            self.slot.event = event

    monkeypatch.setattr(InFlightStep, "collect", faulty)
    assert_found(faults_found(), RaceError)


def test_9_a_padded_row_index_of_zero_commits_into_row_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RequestRows.batch_columns

    def faulty(self: RequestRows, rows: Any, *offsets: Any) -> Any:
        scratch, self.scratch_row = self.scratch_row, 0
        try:
            return right(self, rows, *offsets)
        finally:
            self.scratch_row = scratch

    monkeypatch.setattr(RequestRows, "batch_columns", faulty)
    # In chunks, so that row 0 is often in the middle of its prompt.
    chunks = {**PADDED, "long_prefill_token_threshold": 3}
    with monkeypatch.context() as patch:
        patch.setattr(RequestRows, "batch_columns", right)
        assert_right(faults_found(**chunks))
    assert_found(faults_found(**chunks, speculative_config=None), AssertionError)
    # A drafter may stumble over the row before a token is wrong.
    assert_found(faults_found(**chunks), AssertionError, DeviceFaultError)
