"""Calls to the package: each must fit the signatures of FlashInfer 0.6.14, which are listed here by name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.backends import flashinfer_library
from slipstream.attention.backends.flashinfer import FlashInferBackend
from slipstream.attention.backends.flashinfer_library import (
    ContextKeys,
    DecodeKeys,
    FlashInferLibrary,
    LayerShape,
    PassSizes,
    PlanPages,
)
from slipstream.attention.backends.flashinfer_paths import Choice, Features, HeadShape, Paths, choose_paths
from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.metadata import CommonAttentionMetadata

MAKE = "float_workspace_buffer kv_layout use_cuda_graph=0"
SHAPE = "num_qo_heads num_kv_heads {} page_size"
OPTIONS = "sm_scale=0 window_left=0 q_data_type=0 kv_data_type=0"
SIGNATURES = {
    "decode": f"{MAKE} use_tensor_cores=0",
    "decode.plan": f"indptr indices last_page_len {SHAPE.format('head_dim')} pos_encoding_mode=0 {OPTIONS}",
    "decode.run": "q paged_kv_cache out=0 enable_pdl=0",
    "prefill": MAKE,
    "prefill.plan": "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len "
    f"{SHAPE.format('head_dim_qk')} head_dim_vo=0 causal=0 {OPTIONS}",
    "prefill.run": "q paged_kv_cache out=0 enable_pdl=0",
    "cascade": f"num_levels {MAKE}",
    "cascade.plan": "qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr paged_kv_last_page_len "
    f"{SHAPE.format('head_dim')} causal=0 {OPTIONS}",
    "cascade.run": "q paged_kv_cache",
    "trtllm_decode": "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale=0 bmm2_scale=0 "
    "window_left=0 out=0 kv_layout=0 enable_pdl=0 q_len_per_req=0 mask=0",
    "trtllm_context": "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale "
    "bmm2_scale batch_size cum_seq_lens_q cum_seq_lens_kv window_left=0 out=0 kv_layout=0 enable_pdl=0",
}
SHAPE_OF_A_LAYER = LayerShape(8, 2, 64, 16, 0.125, 33, torch.bfloat16)


class Package:
    """Takes down what each function was called with, by the names of its parameters."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def note(self, name: str, *args: Any, **kwargs: Any) -> None:
        parameters = []
        for word in SIGNATURES[name].split():
            default = 0 if word.endswith("=0") else inspect.Parameter.empty
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(word.removesuffix("=0"), kind, default=default))
        self.calls.append((name, inspect.Signature(parameters).bind(*args, **kwargs).arguments))

    def wrapper(self, name: str) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            self.note(name, *args, **kwargs)
            run = self.returning(f"{name}.run")
            return SimpleNamespace(plan=lambda *a, **k: self.note(f"{name}.plan", *a, **k), run=run)

        return make

    def returning(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.note(name, *args, **kwargs)
            return torch.full((3, 8, 64), 2.0)

        return call

    def module(self, name: str) -> Any:
        return {
            "flashinfer.decode": SimpleNamespace(
                BatchDecodeWithPagedKVCacheWrapper=self.wrapper("decode"),
                trtllm_batch_decode_with_kv_cache=self.returning("trtllm_decode"),
            ),
            "flashinfer.prefill": SimpleNamespace(
                BatchPrefillWithPagedKVCacheWrapper=self.wrapper("prefill"),
                trtllm_batch_context_with_kv_cache=self.returning("trtllm_context"),
            ),
            "flashinfer.cascade": SimpleNamespace(MultiLevelCascadeAttentionWrapper=self.wrapper("cascade")),
        }[name]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package()
    monkeypatch.setattr(flashinfer_library, "is_installed", lambda: True)
    monkeypatch.setattr(flashinfer_library.importlib, "import_module", package.module)
    monkeypatch.setattr(flashinfer_library, "_WORKSPACE_BYTES", 64)
    return package


def make_library(prefill: str = "native", decode: str = "xqa", cascade: str = "none") -> FlashInferLibrary:
    paths = Paths(Choice(prefill, ""), Choice(decode, ""), Choice(cascade, ""))  # type: ignore[arg-type]
    return FlashInferLibrary(paths, torch.device("cpu"))


def pages(mark: int) -> PlanPages:
    return PlanPages(*(torch.tensor([mark + i]) for i in range(4)))


Q, KV, OUT = torch.ones(3, 8, 64), torch.ones(2, 2, 2, 16, 64), torch.zeros(3, 8, 64)


def test_plans_are_made_with_one_wrapper_a_shape(package: Package) -> None:
    library, own = make_library(), pages(10)
    for _ in range(2):
        library.plan_prefill("prefill", SHAPE_OF_A_LAYER, own).run(Q, KV, (own.page_ids,), OUT)
        library.plan_decode(SHAPE_OF_A_LAYER, own).run(Q, KV, (own.page_ids,), OUT)
    library.plan_prefill("verify", SHAPE_OF_A_LAYER, own)
    names = [name for name, _ in package.calls]
    assert names.count("prefill") == 2 and names.count("decode") == 1
    prefill, decode = (
        next(args for name, args in package.calls if name == f"{kind}.plan") for kind in ("prefill", "decode")
    )
    assert prefill["qo_indptr"] is own.query_starts and prefill["paged_kv_indptr"] is own.page_starts
    assert prefill["paged_kv_indices"] is own.page_ids and prefill["paged_kv_last_page_len"] is own.last_page_lens
    assert decode["indptr"] is own.page_starts and decode["indices"] is own.page_ids
    assert decode["last_page_len"] is own.last_page_lens
    assert prefill["causal"] is True
    for args in (prefill, decode):
        assert (args["num_qo_heads"], args["num_kv_heads"], args["page_size"]) == (8, 2, 16)
        assert (args["sm_scale"], args["window_left"], args["q_data_type"]) == (0.125, 32, torch.bfloat16)
    made = dict(package.calls[:2] + [call for call in package.calls if call[0] == "decode"])
    assert made["prefill"]["kv_layout"] == made["decode"]["kv_layout"] == "HND"
    assert made["decode"]["use_tensor_cores"] is True  # four query heads a key head


def test_a_cascade_has_levels(package: Package) -> None:
    levels = (pages(10), pages(20))
    make_library(cascade="native").plan_cascade(SHAPE_OF_A_LAYER, levels).run(Q, KV, (), out := OUT.clone())
    assert out.eq(2.0).all()
    args = dict(package.calls)["cascade.plan"]
    assert args["qo_indptr_arr"] == [level.query_starts for level in levels]
    assert args["paged_kv_indptr_arr"] == [level.page_starts for level in levels]
    assert args["paged_kv_indices_arr"] == [level.page_ids for level in levels]
    assert args["paged_kv_last_page_len"] == [level.last_page_lens for level in levels]
    assert dict(package.calls)["cascade"]["num_levels"] == 2


def test_decodes_of_lengths_on_the_device(package: Package) -> None:
    table, lens = torch.ones(3, 5, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    library = make_library()
    library.trtllm_decode(Q, KV, DecodeKeys(table, lens, None), OUT, PassSizes(1, 77, 0.5, -1))
    args = dict(package.calls)["trtllm_decode"]
    assert args["block_tables"] is table and args["seq_lens"] is lens and args["out"] is OUT
    assert (args["max_seq_len"], args["bmm1_scale"], args["bmm2_scale"], args["window_left"]) == (77, 0.5, 1.0, -1)
    assert (args["kv_layout"], args["q_len_per_req"]) == ("HND", 1) and "mask" not in args
    mask = torch.tensor([[[1], [3], [7]]], dtype=torch.int32)
    library.trtllm_decode(Q, KV, DecodeKeys(table[:1], lens[:1], mask), OUT, PassSizes(3, 77, 0.5, -1))
    mask = package.calls[-1][1]["mask"]
    assert mask.dtype == torch.uint16 and mask.shape == (1, 3, 2) and mask.tolist() == [[[1, 0], [3, 0], [7, 0]]]


def test_prefills_of_lengths_on_the_device(package: Package) -> None:
    table, lens, starts, counts = (torch.ones(n, dtype=torch.int32) for n in (5, 2, 3, 3))
    keys, sizes = ContextKeys(table, lens, starts, counts), PassSizes(9, 77, 0.5, 3)
    make_library("trtllm", "trtllm").trtllm_context(Q, KV, keys, OUT, sizes)
    args = dict(package.calls)["trtllm_context"]
    assert args["seq_lens"] is lens and args["cum_seq_lens_q"] is starts and args["cum_seq_lens_kv"] is counts
    assert (args["max_q_len"], args["max_kv_len"], args["batch_size"], args["window_left"]) == (9, 77, 2, 3)
    assert (args["bmm1_scale"], args["bmm2_scale"], args["kv_layout"]) == (0.5, 1.0, "HND")


def test_memory_is_taken_for_what_runs(package: Package) -> None:
    sizes = [
        (library._counted.numel(), library._scratch.numel()) for library in (make_library(), make_library("trtllm"))
    ]
    assert sizes == [(64, 64), (64, 0)]


# --- the package itself ---------------------------------------------------------------------------

PAGE, MAX_PAGES, HEADS, KV_HEADS, DIM = 16, 20, 8, 2, 64
LIMIT = PAGE * MAX_PAGES
DECODES, PREFILLS = [LIMIT - 1, 1, 40, 133, 100], [(0, 70), (64, 33)]


def gpu_step(query_len: int, prefills: list[tuple[int, int]], num_common: int) -> CommonAttentionMetadata:
    """Decodes with fewer drafts than there is room for, one at the context limit and one just begun; then prefills."""
    decodes = [start for start in DECODES if start >= num_common * PAGE]
    rows = [
        (start, query_len, 1 if start + query_len > LIMIT else 1 + i % query_len) for i, start in enumerate(decodes)
    ]
    rows += [(max(start, num_common * PAGE), n, n) for start, n in prefills]
    computed, planned, alive = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    starts = np.concatenate([[0], np.cumsum(planned)]).astype(np.int32)
    table = 1 + torch.randperm(len(rows) * MAX_PAGES).view(len(rows), MAX_PAGES).int()
    table[:, :num_common] = table[0, :num_common]
    return CommonAttentionMetadata(
        *(len(rows), int(starts[-1]), int(planned.max()), torch.from_numpy(starts), starts),
        *(torch.from_numpy(alive), torch.from_numpy(computed + alive), np.minimum(computed + planned, LIMIT)),
        *(table, torch.zeros(int(starts[-1]), dtype=torch.int64)),
        num_computed_cpu=computed,
        num_common_pages=num_common,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("num_common", [0, 2], ids=["", "cascade"])
@pytest.mark.parametrize("prefills", [[], PREFILLS], ids=["decodes", "mixed"])
@pytest.mark.parametrize("query_len", [1, 4])
def test_what_the_package_computes(query_len: int, prefills: list[Any], num_common: int, window: int) -> None:
    """Against the definition, on whichever paths this GPU has; recorded too where they say that they can be."""
    pytest.importorskip("flashinfer")
    torch.manual_seed(0)
    device, features = torch.device("cuda"), Features(query_len, window, cascade=num_common > 0)
    shape = HeadShape(HEADS, KV_HEADS, DIM, PAGE, "bfloat16")
    paths = choose_paths(torch.cuda.get_device_capability(), shape, features, installed=True)
    backend = FlashInferBackend(paths, FlashInferLibrary(paths, device), PAGE, 8, (1, query_len), device)
    step = gpu_step(query_len, prefills, num_common)
    layer = AttentionLayer(0, HEADS, KV_HEADS, DIM, 0.125, window)
    q = torch.randn(step.num_actual_tokens, HEADS, DIM).bfloat16()
    cache = torch.randn(len(step.seq_lens) * MAX_PAGES + 2, 2, KV_HEADS, PAGE, DIM).bfloat16()
    cache[0] = 0.0
    names = ("query_start_loc", "query_lens", "seq_lens", "block_table", "slot_mapping")
    common = replace(step, **{name: getattr(step, name).to(device) for name in names})
    there = (q.to(device), cache.to(device))

    def run() -> torch.Tensor:
        return backend.run(layer, *there, backend.build(common))

    expected = ReferenceBackend().run(layer, q.float(), cache.float(), step)
    torch.testing.assert_close(run().float().cpu(), expected, rtol=2e-2, atol=2e-2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    if not prefills and not num_common and paths.graph_support == "decode":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        there[0].mul_(2.0)
        graph.replay()
        expected = ReferenceBackend().run(layer, 2.0 * q.float(), cache.float(), step)
        torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)
