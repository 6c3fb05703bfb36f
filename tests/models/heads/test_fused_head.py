"""Draft heads with their norms, gates and residuals folded into the products are the same heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.device.operation import Operation, set_launcher
from slipstream.kernels import native, triton_jit
from slipstream.kernels.tuning.tiles import Weight
from slipstream.models import fused_layer
from slipstream.models.heads.draft_head import DraftHead
from slipstream.models.heads.fused_head import head_weights
from slipstream.models.heads.registry import build_head, read_head
from slipstream.models.load import load_weights
from slipstream.models.registry import architecture_of
from slipstream.models.shapes import HEAD_SHAPES, shape_config
from tests.contexts import context_of, step_of
from tests.kernels.triton_check import quietly_interpreted
from tests.models.heads import test_draft_heads, tiny_heads
from tests.models.heads.test_draft_heads import CHUNKS, Run
from tests.models.heads.tiny_heads import CASES, HIDDEN, VOCAB, Case, default_dtype, tiny_target

DENSE = [name for name in CASES if "Mixtral" not in name]
# All that differs on the way through the kernels.
VARIANTS = [
    "eagle3 of NVIDIA",
    "eagle3, residual normed",
    "eagle3, normed output",
    "eagle3 of its own size, tied",
    "eagle3 of two layers with biases",
    "eagle of two layers, prefixed, bin",
    "mtp of DeepSeek over Qwen3",
    "mtp of Qwen3-Next, two layers, tied",
]


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: weights stay as they are stored, and passes of up to 16 tokens are fused."""
    monkeypatch.setattr(native, "usable", lambda *_: None)
    monkeypatch.setattr(fused_layer, "max_fused_tokens", lambda like, weights: 16)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
@pytest.mark.parametrize("name", CASES)
def test_drafts_what_the_plain_head_drafts(
    name: str, chunks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_fused: list[int] = []
    original = fused_layer.FusedLayers._after_projection

    def load(case: Case, folder: Path) -> DraftHead:
        head = tiny_heads.load(case, folder)
        head.finish_weights()
        return head

    monkeypatch.setattr(test_draft_heads, "load", load)
    monkeypatch.setattr(
        fused_layer.FusedLayers,
        "_after_projection",
        lambda *args: num_fused.append(args[1].shape[0]) or original(*args),
    )
    test_draft_heads.test_drafts_what_the_plain_head_drafts(CASES[name], chunks, tmp_path)
    # Experts run unfused, and so do passes of many tokens.
    assert (len(num_fused) >= 3 if name in DENSE else not num_fused) and all(n <= 16 for n in num_fused)


def build(case: Case, dtype: torch.dtype, device: str) -> DraftHead:
    target = tiny_target(case.target)
    with default_dtype(dtype), torch.device(device):
        model = architecture_of(target.config)(target.model.config, 64)
        head = build_head(read_head(case.config, target.model.config, case.kind), model, 64)
    load_weights(model, target.tensors.items())
    load_weights(head, case.tensors.items())
    head.finish_weights()
    return head


def moved(context: AttentionContext, device: str) -> AttentionContext:
    names = ("query_start_loc", "query_lens", "seq_lens", "block_table", "slot_mapping")
    step = step_of(context)
    tables = {name: getattr(step.shared, name).to(device) for name in names}
    metadata = replace(step.shared, **tables)
    caches = [cache.to(device) for cache in step.caches.in_order]
    return context_of(step.caches.attention, metadata, caches, context.positions.to(device), metadata.slot_mapping)


@torch.inference_mode()
def two_passes(head: DraftHead, device: str = "cpu") -> list[Tensor]:
    """States and logits of a first pass over two requests, and of one over a token of each."""
    dtype = head.borrowed.like.dtype
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(6, max(1, len(head.taps)) * HIDDEN, generator=generator).to(dtype).to(device)
    ids = torch.randint(0, VOCAB, (8,), generator=generator).int().to(device)
    run = Run(head, None)  # type: ignore[arg-type]
    run.kv_caches = [cache.to(device) for cache in run.kv_caches]
    at_first = moved(run.context([0, 1], [0, 0], [4, 2]), device)
    next_context = moved(run.context([0, 1], [4, 2], [1, 1]), device)
    with torch.device(device):
        first = head.forward(0, ids[:6], head.combine(features), at_first)
        last = first[[3, 5]]
        second = head.forward(0, ids[6:], last, next_context)
        return [first, head.compute_logits(last), second, head.compute_logits(second)]


def check_against_plain(name: str, dtype: torch.dtype, device: str) -> None:
    """As far from the same head in float64 as the plain way, in the same type, is: both round, and not alike."""
    case = CASES[name]()
    head = build(case, dtype, device)
    assert all(fused is not None for fused in head.fused)
    with quietly_interpreted() if device == "cpu" else nullcontext():
        found = two_passes(head, device)
    head.fused = []
    plain = two_passes(head, device)
    exact = build(case, torch.float64, "cpu")
    exact.fused = []
    for ours, theirs, expected in zip(found, plain, two_passes(exact), strict=True):
        assert ours.dtype == theirs.dtype
        error, plain_error = (float((x.cpu().double() - expected).norm() / expected.norm()) for x in (ours, theirs))
        assert error <= 2 * plain_error + 1e-6


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_round_no_worse_than_the_plain_way(name: str, dtype: torch.dtype) -> None:
    check_against_plain(name, dtype, "cpu")


@torch.inference_mode()
def keys_left(head: DraftHead, only_keys: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(6, max(1, len(head.taps)) * HIDDEN, generator=generator).to(head.borrowed.like.dtype)
    ids = torch.randint(0, VOCAB, (6,), generator=generator).int()
    run = Run(head, None)  # type: ignore[arg-type]
    context = run.context([0, 1], [0, 0], [4, 2])
    if only_keys:
        head.write_keys(ids, head.combine(features), context)
    else:
        head.forward(0, ids, head.combine(features), context)
    return run.kv_caches


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_what_is_only_shown_to_a_head_leaves_the_same_keys(name: str, fused: bool) -> None:
    head = build(CASES[name](), torch.float64, "cpu")
    if not fused:
        head.fused = []
    for found, wanted in zip(keys_left(head, True), keys_left(head, False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_leave_the_same_keys(name: str) -> None:
    case = CASES[name]()
    head = build(case, torch.float32, "cpu")
    with quietly_interpreted():
        found = keys_left(head, True)
    for ours, wanted in zip(found, keys_left(build(case, torch.float64, "cpu"), False), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@contextmanager
def noted_launches() -> Iterator[list[str]]:
    """Operations, and what torch computes outside of them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []
    inside = [False]

    def launch(op: Operation[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.append(op.name)
        inside[0] = True
        try:
            return op.body(*args, **kwargs)
        finally:
            inside[0] = False

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            is_view = isinstance(out, Tensor) and any(
                isinstance(a, Tensor) and a.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
                for a in args
            )
            if not inside[0] and isinstance(out, Tensor) and not is_view:
                names.append(str(func))
            return out

    set_launcher("cpu", launch)
    try:
        with Noting():
            yield names
    finally:
        set_launcher("cpu", None)


BEFORE, LAYER = ["rotation_and_slots", "join_states"], ["linear_add_scaled", "scaled_gated", "linear_add"]
ATTENTION = ["rope_and_cache", "paged_attention"]  # on a GPU one launch


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eagle3 of SpecForge", [*BEFORE, "linear_few", *ATTENTION, *LAYER]),
        ("eagle3, residual normed", [*BEFORE, "linear_few", *ATTENTION, *LAYER]),
        ("eagle", [*BEFORE, "linear_few", "linear_few", *ATTENTION, *LAYER]),
        ("mtp of DeepSeek", [*BEFORE, "linear_scaled", "scaled_linear", *ATTENTION, *LAYER, "rms_norm"]),
    ],
)
def test_the_launches_of_a_pass(name: str, expected: list[str]) -> None:
    head = build(CASES[name](), torch.float64, "cpu")
    hidden = torch.randn(2, HIDDEN, dtype=torch.float64)
    ids, context = torch.tensor([3, 4]).int(), Run(head, None).context([0, 1], [0, 0], [1, 1])  # type: ignore[arg-type]
    with noted_launches() as names:
        head.forward(0, ids, hidden, context)
    assert names == expected


def test_many_tokens_take_the_plain_way() -> None:
    head = build(CASES["eagle3 of SpecForge"](), torch.float64, "cpu")
    few, many = torch.zeros(16, HIDDEN), torch.zeros(17, HIDDEN)
    assert head.fused_for(0, few) is not None
    assert head.fused_for(0, many) is None


def weights_of(config: dict[str, Any], kind: Any = None) -> tuple[Weight, ...]:
    target = shape_config("llama-3.1-8b")
    plan = read_head(config, architecture_of(target).read_config(target), kind)
    layer, mix, logits = head_weights(plan, 2)
    return (*mix, *layer, logits)


def test_what_heads_of_a_shape_multiply_with() -> None:
    rest = (Weight("add", 4096, 4096, 2), Weight("gated", 14336, 4096, 2), Weight("add", 4096, 14336, 2))
    config = HEAD_SHAPES["llama-3.1-8b-eagle3"]
    mix, qkv = Weight("plain", 4096, 12288, 2), Weight("plain", 6144, 8192, 2)
    assert weights_of(config) == (mix, qkv, *rest, Weight("head", 32000, 4096, 2))
    assert weights_of({**config, "use_aux_hidden_state": False}) == (qkv, *rest, Weight("head", 32000, 4096, 2))
    pair, logits = Weight("plain", 4096, 8192, 2), Weight("head", 128256, 4096, 2)
    eagle = {**shape_config("llama-3.1-8b"), "architectures": ["LlamaForCausalLMEagle"]}
    assert weights_of(eagle) == (pair, Weight("plain", 6144, 4096, 2), *rest, logits)
    mtp = {**shape_config("llama-3.1-8b"), "num_nextn_predict_layers": 1}
    assert weights_of(mtp, "mtp") == (pair, Weight("norm", 6144, 4096, 2), *rest, logits)


@pytest.mark.parametrize("name", DENSE)
def test_the_weights_are_those_of_the_head(name: str) -> None:
    """By the matrices themselves: out of ``head_weights`` come the shapes that are multiplied with."""
    head = build(CASES[name](), torch.float64, "cpu")
    layer, mix, _ = head_weights(head.plan, 8)
    fused = head.fused[0]
    assert fused is not None
    _, attention, _, mlp = fused.layers[0]
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    shapes = [tuple(linear.matrix.dequantised().shape) for linear in products]
    assert shapes == [(w.out_size * (2 if w.kind == "gated" else 1), w.in_size) for w in layer]
    assert [linear.matrix.tile_key(w.kind) for linear, w in zip(products, layer, strict=True)] == list(layer)
    mixing = getattr(head, "fc", None) or getattr(head.layers[0], "eh_proj", None)
    assert list(mix) == ([] if mixing is None else [mixing.matrix.tile_key("plain")])
