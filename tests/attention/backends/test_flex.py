"""Attention through flex_attention: any mask, over pages, sized by the host's bounds.

Expected values are computed in float64, token by token, from the slots that the token may see and no others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from slipstream import LLM, SamplingParams
from slipstream.attention.backend import AttentionLayer
from slipstream.attention.backends import flex
from slipstream.attention.backends.flex import (
    Causal,
    Documents,
    FlexBackend,
    FlexPlan,
    FlexShape,
    MaskFunction,
    PrefixLM,
)
from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.grouped_query import NewHeads
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.cpu import dtype_works
from slipstream.device.sim import SimDevice
from slipstream.output import RequestOutput
from tests import tiny_models
from tests.contexts import context_of
from tests.operation_checks import checked_operations

PAGE, DIM, SCALE = 4, 8, 0.3
Sees = Callable[[int, int, int], bool]  # (request, position of the query, position of the key)


@dataclass
class Step:
    """A batch as the runner would tell it: what the host knows may be more than what is true."""

    common: CommonAttentionMetadata
    q: Tensor
    sees: Sees = lambda _request, query, key: key <= query

    def living(self) -> Iterator[tuple[int, int, int]]:
        """(token, request, position) of every token that is alive."""
        common = self.common
        for i, (alive, seq_len) in enumerate(zip(common.query_lens.tolist(), common.seq_lens.tolist(), strict=True)):
            for j in range(alive if seq_len else 0):
                yield int(common.query_start_loc[i]) + j, i, seq_len - alive + j

    def slots(self, request: int, position: int, window: int) -> list[int]:
        starts = self.common.seq_starts
        start = 0 if starts is None else int(starts[request])
        if position < start:
            return []
        near = range(max(start, position - window + 1) if window else start, int(self.common.seq_lens[request]))
        return [key for key in near if self.sees(request, position, key)]

    def pages(self, request: int, slots: list[int]) -> tuple[Tensor, Tensor]:
        at = torch.tensor(slots, dtype=torch.int64)
        return self.common.block_table[request, at // PAGE].long(), at % PAGE

    def expected(self, cache: Tensor, window: int) -> Tensor:
        kv_heads = cache.shape[2]
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for token, request, position in self.living():
            if slots := self.slots(request, position, window):
                pages, offsets = self.pages(request, slots)
                keys, values = cache[pages, :, :, offsets].double().unbind(1)
                query = self.q[token].double().view(kv_heads, -1, DIM)
                weights = torch.softmax(torch.einsum("hgd,khd->hgk", query, keys) * SCALE, dim=-1)
                out[token] = torch.einsum("hgk,khd->hgd", weights, values).reshape(-1, DIM)
        return out

    def poisoned(self, cache: Tensor, window: int) -> Tensor:
        """NaN in every slot that no token may see, the null page's among them."""
        poisoned = torch.full_like(cache, torch.nan)
        for _, request, position in self.living():
            pages, offsets = self.pages(request, self.slots(request, position, window))
            poisoned[pages, :, :, offsets] = cache[pages, :, :, offsets]
        return poisoned


def draw_step(seed: int, num_reqs: int, heads: int = 4, starts: bool = False, chunk: int = 40, most: int = 50) -> Step:
    """Chunks of prompts, decodes, drafts of which some were not made, rows that stopped; then padding."""
    rng = random.Random(seed)
    kinds = [["chunk", "decode", "verify", "stopped"], ["chunk", "decode"], ["verify"], ["decode"]][seed % 4]
    planned, alive, lens, bounds = [], [], [], []
    for _ in range(num_reqs):
        kind = rng.choice(kinds)
        num_tokens = {"chunk": rng.randint(1, chunk), "decode": 1, "verify": 4, "stopped": rng.randint(1, 4)}[kind]
        num_alive = {"verify": rng.randint(1, 4), "stopped": 0}.get(kind, num_tokens)
        before = rng.choice([0, PAGE - 1, PAGE, 2 * PAGE + 1, rng.randint(0, most)]) if kind == "chunk" else None
        before = rng.randint(1, most) if before is None else before
        planned.append(num_tokens)
        alive.append(num_alive)
        lens.append(before + num_alive if num_alive else 0)
        # Steps in flight count as if all their drafts were accepted; what the host knows of a prompt is exact.
        bounds.append(before + num_tokens + (0 if kind == "chunk" else rng.randint(0, 9)))
    num_padding = rng.choice([0, 3])
    starts_cpu = np.concatenate([[0], np.cumsum(planned)]).astype(np.int32)
    max_pages = -(-max(bounds) // PAGE) + 1
    table = torch.zeros(num_reqs + num_padding, max_pages, dtype=torch.int32)
    page_ids = iter(rng.sample(range(1, num_reqs * max_pages + 1), num_reqs * max_pages))
    for i, bound in enumerate(bounds):
        for j in range(-(-bound // PAGE)):
            table[i, j] = next(page_ids)
    if num_reqs > 1 and min(lens[:2]) > 2 * PAGE:
        table[1, :1] = table[0, :1]  # a prefix that both have
    first = torch.tensor([rng.choice([0, max(0, n - rng.randint(-2, 9)), n // 2]) for n in lens] + [0] * num_padding)
    zeros = [0] * num_padding
    q = torch.full((int(starts_cpu[-1]) + rng.choice([0, 5]), heads, DIM), torch.nan, dtype=torch.float64)
    common = CommonAttentionMetadata(
        num_reqs=num_reqs,
        num_actual_tokens=int(starts_cpu[-1]),
        max_query_len=max(planned),
        query_start_loc=torch.tensor([*starts_cpu, *[starts_cpu[-1]] * num_padding], dtype=torch.int32),
        query_start_loc_cpu=starts_cpu,
        query_lens=torch.tensor(alive + zeros, dtype=torch.int32),
        seq_lens=torch.tensor(lens + zeros, dtype=torch.int32),
        seq_lens_cpu_upper_bound=np.array(bounds, dtype=np.int32),
        block_table=table,
        slot_mapping=torch.full((len(q),), -1),
        seq_starts=first.int() if starts else None,
    )
    step = Step(common, q)
    torch.manual_seed(seed)
    for token, request, position in step.living():
        if step.slots(request, position, 0):
            q[token] = torch.randn(heads, DIM, dtype=torch.float64)
    return step


def draw_cache(step: Step, kv_heads: int = 2) -> Tensor:
    return torch.randn(int(step.common.block_table.max()) + 2, 2, kv_heads, PAGE, DIM, dtype=torch.float64)


def layer_of(step: Step, cache: Tensor, window: int) -> AttentionLayer:
    return AttentionLayer(0, step.q.shape[1], cache.shape[2], DIM, SCALE, window)


def flexed(step: Step, cache: Tensor, window: int, mask: MaskFunction | None = None, key_block: int = 16) -> Tensor:
    backend = FlexBackend(PAGE, mask, key_block)
    return backend.run(layer_of(step, cache, window), step.q, cache, backend.build(step.common))


def assert_exact(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def prefix_lm(step: Step, seed: int) -> MaskFunction:
    rng = random.Random(seed)
    # Some have all their tokens in it.
    lens = torch.tensor([rng.choice([length, rng.randint(0, 40)]) for length in step.common.seq_lens.tolist()])
    known = lens.tolist()
    step.sees = lambda request, query, key: key <= query or max(query, key) < known[request]
    return PrefixLM(lens.int())


def documents(step: Step, seed: int) -> MaskFunction:
    shape = (len(step.common.seq_lens), step.common.max_seq_len)
    ids = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.1).int().cumsum(1)
    known = ids.tolist()
    step.sees = lambda request, query, key: key <= query and known[request][query] == known[request][key]
    return Documents(ids.int())


MASKS: dict[str, Callable[[Step, int], MaskFunction]] = {
    "causal": lambda _step, _seed: Causal(),
    "prefix": prefix_lm,
    "documents": documents,
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


# --- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("starts", [False, True], ids=["whole", "starts"])
@pytest.mark.parametrize("window", [0, 1, 7, 30])
@pytest.mark.parametrize(("seed", "num_reqs"), list(enumerate([1, 2, 3, 6, 11, 11, 40])))
def test_a_mixed_batch_sees_its_own_keys_and_no_others(seed: int, num_reqs: int, window: int, starts: bool) -> None:
    step = draw_step(seed, num_reqs, starts=starts)
    cache = draw_cache(step)
    with checked_operations(compare_inputs=True):
        out = flexed(step, step.poisoned(cache, window), window)
    assert_exact(out, step.expected(cache, window))
    # The reference masks in its own way, and may not meet NaN while doing so; nor may a query that sees nothing.
    reference = ReferenceBackend()
    q, layer = step.q.nan_to_num(), layer_of(step, cache, window)
    assert_exact(out, reference.run(layer, q, cache, reference.build(step.common)))


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("starts", [False, True], ids=["whole", "starts"])
@pytest.mark.parametrize("name", ["prefix", "documents"])
@pytest.mark.parametrize("seed", range(4))
def test_masks_that_a_model_may_ask_for(seed: int, name: str, starts: bool, window: int) -> None:
    step = draw_step(seed, 7, starts=starts)
    cache, mask = draw_cache(step), MASKS[name](step, seed)
    out = flexed(step, step.poisoned(cache, window), window, mask)
    assert_exact(out, step.expected(cache, window))


def test_a_prefix_really_looks_ahead_and_documents_really_end() -> None:
    step = draw_step(0, 4, chunk=30)
    cache = draw_cache(step)
    for name in ("prefix", "documents"):
        assert (flexed(step, cache, 0, MASKS[name](step, 0)) - flexed(step, cache, 0)).abs().max() > 0.01


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (8, 1)])
def test_heads_share_keys(heads: int, kv_heads: int) -> None:
    step = draw_step(5, 4, heads=heads)
    cache = draw_cache(step, kv_heads)
    assert_exact(flexed(step, step.poisoned(cache, 0), 0), step.expected(cache, 0))


@pytest.mark.parametrize("key_block", [1, PAGE, 32, 128])
@pytest.mark.parametrize("window", [0, 100])
def test_blocks_of_any_size(key_block: int, window: int) -> None:
    step = draw_step(3, 3, chunk=150, most=300)
    cache = draw_cache(step)
    out = flexed(step, step.poisoned(cache, window), window, key_block=key_block)
    assert_exact(out, step.expected(cache, window))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
def test_other_types(dtype: torch.dtype, tolerance: float) -> None:
    name = str(dtype).removeprefix("torch.")
    assert name in FlexBackend.caps.dtypes
    if not dtype_works(name):
        pytest.skip(f"{name} matrix products crash on this CPU")
    step = draw_step(2, 6)
    step.q = step.q.to(dtype)
    cache = draw_cache(step).to(dtype)
    out = flexed(step, step.poisoned(cache, 0), 0)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), step.expected(cache, 0), rtol=tolerance, atol=tolerance)


def test_a_batch_of_padding_alone_gives_zeros() -> None:
    step = draw_step(1, 3)
    nothing = torch.zeros_like(step.common.seq_lens)
    step.common = replace(step.common, seq_lens=nothing)
    out = flexed(step, torch.full_like(draw_cache(step), torch.nan), 0)
    assert torch.equal(out, torch.zeros_like(out))


class Odd:
    """A mask that is no use: every other token sees nothing."""

    looks_ahead: ClassVar[bool] = False
    sees_all_before: ClassVar[bool] = False
    inputs: tuple[Tensor, ...] = ()

    @staticmethod
    def visible(inputs: tuple[Tensor, ...], request: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < query) & (query % 2 == 0)


def test_a_token_to_which_the_mask_leaves_nothing_gives_zeros() -> None:
    step = draw_step(4, 5)
    step.sees = lambda _request, query, key: key < query and query % 2 == 0
    cache = draw_cache(step)
    assert_exact(flexed(step, step.poisoned(cache, 0), 0, Odd()), step.expected(cache, 0))


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nan_and_infinity_reach_only_tokens_that_attend_to_them(number: float, part: int) -> None:
    step = draw_step(1, 6)
    cache, at = draw_cache(step), int(step.common.seq_lens[0]) // 2
    right = step.expected(cache, 0)
    assert at > PAGE, "not in a page that others share"
    cache[step.common.block_table[0, at // PAGE], part, 0, at % PAGE] = number
    out = flexed(step, cache, 0)
    hit = [t for t, r, p in step.living() if r == 0 and at in step.slots(r, p, 0)]
    rest = sorted({*range(len(out))} - {*hit})
    assert hit and rest
    assert out[hit].isfinite().logical_not().any(-1).any(-1).all()
    assert_exact(out[rest], right[rest])


def test_a_shared_step_may_start_later_or_see_otherwise() -> None:
    step, backend = draw_step(6, 6), FlexBackend(PAGE, key_block=16)
    cache, metadata = draw_cache(step), backend.build(step.common)
    layer = layer_of(step, cache, 0)
    assert_exact(backend.run(layer, step.q, cache, metadata), step.expected(cache, 0))
    later = replace(step, common=replace(step.common, seq_starts=(step.common.seq_lens // 2).int()))
    assert later.common.seq_starts is not None
    moved = backend.starting_at(metadata, later.common.seq_starts)
    poisoned = later.poisoned(cache, 0)
    assert_exact(backend.run(layer, step.q, poisoned, moved), later.expected(cache, 0))
    mask = documents(step, 1)
    assert_exact(backend.run(layer, step.q, cache, backend.masked(metadata, mask)), step.expected(cache, 0))


# --- blocks -------------------------------------------------------------------------------------------


def planned(step: Step, window: int, mask: MaskFunction) -> tuple[FlexShape, FlexPlan]:
    return FlexBackend(PAGE, mask, key_block=8)._plan(flex.FlexMetadata(step.common, mask), window, len(step.q))


@pytest.mark.parametrize("starts", [False, True], ids=["whole", "starts"])
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("seed", "num_reqs"), list(enumerate([1, 4, 9, 40])))
def test_blocks_that_meet(seed: int, num_reqs: int, name: str, window: int, starts: bool) -> None:
    """A kernel looks at the listed blocks only, and asks the mask about those of the first list only."""
    step = draw_step(seed, num_reqs, starts=starts, chunk=100, most=100)
    shape, plan = planned(step, window, MASKS[name](step, seed))
    size = shape.key_block
    wanted: dict[int, list[set[int]]] = {}  # block of queries -> what each of its tokens sees, as gathered slots
    gathered = {
        (r, p): at
        for at, (r, p) in enumerate(zip(plan.key_requests.tolist(), plan.key_positions.tolist(), strict=True))
    }
    for token, request, position in step.living():
        seen = {gathered[request, key] for key in step.slots(request, position, window)}
        at_query = int(plan.grid_indices[token])
        assert (at_query >= 0) or not seen
        if seen:
            assert plan.tokens[at_query] == token
            wanted.setdefault(at_query // shape.query_block, []).append(seen)
    for block in range(shape.num_query_blocks):
        num_asked, num_full = int(plan.kv_num_blocks[block]), int(plan.full_kv_num_blocks[block])
        asked = plan.kv_indices[block, 0, 0, :num_asked].tolist()
        full = plan.full_kv_indices[block, 0, 0, :num_full].tolist()
        assert len(asked) == num_asked and len(full) == num_full, "the lists are too short"
        assert len({*asked, *full}) == num_asked + num_full, "no block is looked at twice"
        listed = {at // size for at in set().union(*wanted.get(block, [set()]))}
        assert listed <= {*asked, *full}
        if not any(wanted.get(block, [])):
            assert not asked and not full
        for idx in full:
            assert all(set(range(idx * size, idx * size + size)) <= seen for seen in wanted[block])
    for ids in (plan.kv_indices, plan.full_kv_indices):
        assert ids.min() >= 0 and ids.max() < shape.num_key_blocks
    assert sum(map(len, wanted.values())) == (plan.grid_indices >= 0).sum()


def test_whole_blocks_are_found() -> None:
    step = draw_step(3, 3, chunk=150, most=300)
    _, plan = planned(step, 0, Causal())
    assert plan.full_kv_num_blocks.sum() > plan.kv_num_blocks.sum()


def test_sizes_are_those_of_the_bounds() -> None:
    """The device's lengths may be anything below them; the host does not look."""
    step, window = draw_step(8, 9), 0
    shape = FlexShape.for_batch(step.common, 16, window)
    unknown: Any = None
    unreadable = replace(
        step.common, seq_lens=unknown, query_lens=unknown, query_start_loc=unknown, block_table=unknown
    )
    assert FlexShape.for_batch(unreadable, 16, window) == shape
    bounds = step.common.seq_lens_cpu_upper_bound
    assert shape.num_key_blocks >= sum(-(-int(bound) // 16) for bound in bounds)
    cache = draw_cache(step)
    for longer in (1, 64, 1000):
        wide = replace(step.common, seq_lens_cpu_upper_bound=bounds + np.int32(longer))
        assert FlexShape.for_batch(wide, 16, window).num_key_blocks >= shape.num_key_blocks
        assert_exact(flexed(replace(step, common=wide), step.poisoned(cache, 0), 0), step.expected(cache, 0))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17])
def test_a_window_bounds_what_is_gathered(window: int) -> None:
    for seed in range(20):
        step = draw_step(seed, 4, most=300)
        far = FlexShape.for_batch(replace(step.common, seq_lens_cpu_upper_bound=np.full(4, 10**6, np.int32)), 8, window)
        tokens = int(np.diff(step.common.query_start_loc_cpu).sum())
        assert far.num_key_blocks <= 1.25 * (tokens + 4 * (window + 16)) / 8
        cache = draw_cache(step)
        assert_exact(flexed(step, step.poisoned(cache, window), window, key_block=8), step.expected(cache, window))


def test_sizes_are_few_and_large_enough() -> None:
    sizes = [flex._rounded(count) for count in range(5000)]
    assert all(max(2, count) <= size <= max(2, 1.25 * count) for count, size in enumerate(sizes))
    assert len(set(sizes)) < 50


# --- no waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_nothing_waits_for_the_device(name: str) -> None:
    for seed in range(3):
        step = draw_step(seed, 5, starts=True)
        cache, mask = draw_cache(step), MASKS[name](step, seed)
        expected, poisoned = step.expected(cache, 7), step.poisoned(cache, 7)
        device = SimDevice(seed)
        with device.sync_guard.allow("build"):
            names = ("query_start_loc", "query_lens", "seq_lens", "block_table", "slot_mapping", "seq_starts")
            common = replace(step.common, **{n: getattr(step.common, n).to("sim:0") for n in names})
            q, kv_cache = step.q.to("sim:0"), poisoned.to("sim:0")
            mask = type(mask)(*(tensor.to("sim:0") for tensor in mask.inputs))
        backend = FlexBackend(PAGE, mask, key_block=16)
        metadata = backend.build(common)
        layer = layer_of(step, cache, 7)
        outs = [backend.run(layer, q, kv_cache, metadata) for _ in range(2)]
        assert device.sync_guard.num_violations == 0
        for out in outs:
            assert_exact(device.peek(out), expected)


def test_attends_behind_the_cache_write() -> None:
    """Through the model's door: the step's own keys are stored, then seen."""
    step, backend = draw_step(9, 5), FlexBackend(PAGE)
    table = step.common.block_table
    positions, mapping = torch.zeros(len(step.q), dtype=torch.int64), torch.full((len(step.q),), -1)
    for token, request, position in step.living():
        positions[token] = position
        mapping[token] = int(table[request, position // PAGE]) * PAGE + position % PAGE
    cache, new = draw_cache(step), torch.randn(2, len(step.q), 2, DIM, dtype=torch.float64)
    no_turn = torch.stack([torch.ones(512, DIM // 2), torch.zeros(512, DIM // 2)], 1).double()
    context = context_of(backend, backend.build(step.common), [cache], positions, mapping)
    out = context.run(layer_of(step, cache, 0), NewHeads(step.q.nan_to_num(), *new, no_turn))
    for token, request, position in step.living():
        assert torch.equal(cache[table[request, position // PAGE], :, :, position % PAGE], new[:, token])
    assert_exact(out, step.expected(cache, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("gemma3"), tmp_path_factory.mktemp("tiny"))


def generate(folder: Path, **options: Any) -> list[RequestOutput]:
    prompts = ["one two one two one two one two one two", "x", "hello hello hello hello"]
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(folder), dtype="float64", max_num_seqs=3, max_model_len=128, **options) as llm:
        return llm.generate(prompts, sampling)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_whole_engine_on_the_simulated_device(folder: Path, mode: str) -> None:
    """Chunks beside decodes, drafts, several steps in flight; a graph is recorded in pieces, around the attention."""
    wanted = generate(folder, device="cpu", attention_backend="reference")
    options = {"max_num_batched_tokens": 18, "cudagraph_mode": mode, "cudagraph_capture_sizes": (8, 18)}
    drafts = {"speculate": "ngram", "k": 4, "steps_in_flight": 3}
    found = generate(folder, device="sim", attention_backend="flex", **drafts, **options)
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]


# --- compiled -----------------------------------------------------------------------------------------


def test_sizes_do_not_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    counted = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "_compiled", lambda _device_type: counted)
    for seed in range(12):
        step = draw_step(seed, 4 + seed)
        cache = draw_cache(step)
        assert_exact(flexed(step, step.poisoned(cache, 0), 0), step.expected(cache, 0))
    # Two blocks of queries; and extents that happen to be equal are one until they are not.
    assert counter.frame_count <= 4
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler about parts of its own
@pytest.mark.parametrize("name", MASKS)
def test_a_kernel_that_reads_the_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel for CPUs goes through the lists of blocks, as the one for GPUs does."""
    torch._dynamo.reset()
    # That kernel needs lists as long as there are blocks.
    of = FlexShape.of
    square = staticmethod(lambda *args: replace(of(*args), max_key_blocks=of(*args).num_key_blocks))
    monkeypatch.setattr(FlexShape, "of", square)
    # Its source for sizes that vary does not compile (torch 2.13: one name is replaced within another).
    fused = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda _device_type: fused)
    for seed, window in ((0, 0), (3, 0), (0, 40), (2, 40)):
        step = draw_step(seed, 5, starts=seed == 2, chunk=100, most=200)
        cache, mask = draw_cache(step).float(), MASKS[name](step, seed)
        step.q = step.q.float()
        out = flexed(step, step.poisoned(cache, window), window, mask, key_block=32)
        torch.testing.assert_close(out.double(), step.expected(cache, window), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
