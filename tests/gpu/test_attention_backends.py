"""Every backend on the GPU: the definition's results on random batches, and whole engines with drafts, guard on."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from slipstream.attention.backend import AttentionBackend, AttentionLayer
from slipstream.attention.backends.flashinfer import FlashInferBackend
from slipstream.attention.backends.flashinfer_library import FlashInferLibrary
from slipstream.attention.backends.flashinfer_paths import Choice, Features, HeadShape, Paths, choose_paths
from slipstream.attention.backends.flex import FlexBackend
from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.backends.triton import TritonBackend
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_shape
from slipstream.models import shapes
from tests.attention.mixed_batches import DIM, HEADS, KV_HEADS, PAGE, draw_batch, draw_values, on
from tests.engine.drive import make_request, run

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
NATIVE = Paths(Choice("native", "asked for"), Choice("native", "asked for"), Choice("none", ""))
TINY: dict[str, Any] = {
    **shapes.SHAPES["llama-3.1-8b"],
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rope_scaling": None,
}


def make(name: str, query_len: int) -> AttentionBackend:
    if name == "triton":
        return TritonBackend()
    if name == "flex":
        return FlexBackend(PAGE, key_block=128)
    pytest.importorskip("flashinfer")
    shape = HeadShape(HEADS, KV_HEADS, DIM, PAGE, "bfloat16")
    paths = NATIVE
    if name == "xqa":
        paths = choose_paths(torch.cuda.get_device_capability(), shape, Features(query_len), installed=True)
        if paths.decode.path != "xqa":
            pytest.skip(f"no XQA here: {paths.decode.reason}")
    return FlashInferBackend(paths, FlashInferLibrary(paths, DEVICE), PAGE, 40, {1, query_len}, DEVICE)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("name", ["triton", "flex", "native", "xqa"])
def test_random_batches_are_as_defined(name: str, query_len: int) -> None:
    backend, layer = make(name, query_len), AttentionLayer(0, HEADS, KV_HEADS, DIM, 0.125)
    for seed, num_reqs in enumerate([1, 2, 3, 5, 8, 13, 21, 40, 7, 40]):
        torch.manual_seed(seed)
        common = draw_batch(seed, num_reqs, query_len)
        q, cache = draw_values(common)
        expected = ReferenceBackend().run(layer, q.float(), cache.nan_to_num().float(), common)
        there, values = on(common, DEVICE), (q.to(DEVICE), cache.to(DEVICE))
        found = backend.run(layer, *values, backend.build(there)).float().cpu()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def build(monkeypatch: pytest.MonkeyPatch, backend: str, method: str | None, dtype: str, **options: Any) -> Engine:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "1")
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 256}
    monkeypatch.setitem(shapes.HEAD_SHAPES, "tiny-eagle3", {**TINY, **head})
    speculative: dict[str, Any] | None = None
    if method is not None:
        speculative = {"method": method, "num_speculative_tokens": 3}
        speculative |= {"model": "tiny-eagle3"} if method == "eagle3" else {}
    given: dict[str, Any] = {
        "device": "cuda",
        "dtype": dtype,
        "attention_backend": backend,
        "speculative_config": speculative,
        "max_num_seqs": 8,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 400,
        "seed": 3,
        "cudagraph_capture_sizes": (1, 2, 4, 8, 16, 32),
        **options,
    }
    torch.manual_seed(3)
    return build_shape(EngineOptions.from_dict(given), "tiny")


def texts_of(engine: Engine) -> list[list[int]]:
    rng = random.Random(1)
    words = [rng.randrange(512) for _ in range(24)]
    requests = [
        make_request(f"r{i}", (words * 6)[: rng.choice([5, 40, 130])], 40, seed=i, temperature=0.7 * (i % 2))
        for i in range(12)
    ]
    outcomes = run(engine.core, requests)
    assert all(outcome.error is None and len(outcome.token_ids) == 40 for outcome in outcomes.values())
    assert engine.core.stats.num_sync_violations == 0
    engine.core.scheduler.check_idle()
    return [outcome.token_ids for outcome in outcomes.values()]


@pytest.mark.parametrize("method", [None, "ngram", "eagle3"])
def test_flex_gives_tritons_texts(monkeypatch: pytest.MonkeyPatch, method: str | None) -> None:
    expected = texts_of(build(monkeypatch, "triton", None, "float32"))
    engine = build(monkeypatch, "flex", method, "float32")
    assert texts_of(engine) == expected
    assert engine.core.stats.num_drains == 0


@pytest.mark.parametrize("method", [None, "ngram", "eagle3"])
@pytest.mark.parametrize("page", [16, 8], ids=["xqa", "native"])
def test_flashinfer_generates(monkeypatch: pytest.MonkeyPatch, page: int, method: str | None) -> None:
    """Pages of 8 have no XQA: then every step waits for those before it, visibly. Ties of bfloat16 may differ."""
    pytest.importorskip("flashinfer")
    expected = texts_of(build(monkeypatch, "triton", None, "bfloat16"))
    engine = build(monkeypatch, "flashinfer", method, "bfloat16", block_size=page, steps_in_flight=2)
    found = texts_of(engine)
    same = sum(a[:8] == b[:8] for a, b in zip(found, expected, strict=True))
    print(f"{method}, pages of {page}: {same} of 12 begin alike, {engine.core.stats.num_drains} drains")
    assert same >= 6
    assert engine.core.stats.num_drains > (30 if page == 8 else 0)
