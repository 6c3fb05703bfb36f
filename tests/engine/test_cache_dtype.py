"""Keys and values of 16 bits under an engine that computes in float32, on a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.errors import ConfigError
from slipstream.kernels import native
from slipstream.request import Request
from tests import tiny_models
from tests.engine.drive import Outcome, make_request, run

MakeEngine = Callable[..., Engine]
TYPES = ["float16", "bfloat16"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads as wide as the C kernels want them for prompts, and a drafter that is often right."""
    made = {}
    for name, noise in (("target", 0.0), ("near", 0.01)):
        model = tiny_models.build("llama", head_dim=32)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
        made[name] = tiny_models.save(model, tmp_path_factory.mktemp(name))
    return made


@pytest.fixture
def make(folders: dict[str, Path]) -> MakeEngine:
    def make_one(**options: Any) -> Engine:
        defaults = {"model": str(folders["target"]), "dtype": "float32", "max_num_seqs": 12}
        return build_engine(EngineOptions.from_dict({**defaults, **options}))

    return make_one


def random_requests(count: int = 16) -> list[Request]:
    """Some begin alike. Chunks of 24 tokens leave more than a few for the last, which other loops work on."""
    rng = random.Random(3)
    stem = [rng.randrange(256) for _ in range(48)]
    requests = []
    for i in range(count):
        own = [rng.randrange(256) for _ in range(rng.choice([12, 20]))]
        prompt = (stem if i % 2 else []) + own * rng.choice([1, 3, 5] if i % 4 == 0 else [1])
        requests.append(make_request(f"r{i}", prompt[: len(prompt) - (len(prompt) % 24 < 9) * 9], 30, seed=i))
    return requests


WAYS: dict[str, dict[str, Any]] = {
    "in a batch": {},
    "chunked": {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 24, "enable_prefix_caching": False},
    "ngram": {"speculate": "ngram", "k": 3},
    "draft model": {"speculate": "draft_model", "draft_model": "near", "k": 3},
}


@pytest.mark.skipif(native.library() is None, reason="only the C kernels' sums do not depend on the batch")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *TYPES])
def test_the_same_text_alone_in_batches_and_with_drafts(
    make: MakeEngine, folders: dict[str, Path], kv_cache_dtype: str
) -> None:
    alone: dict[str, Outcome] = {}
    for request in random_requests():
        engine = make(kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False)
        alone |= run(engine.core, [request])
    for way, options in WAYS.items():
        named = {key: str(folders[value]) if key == "draft_model" else value for key, value in options.items()}
        engine = make(kv_cache_dtype=kv_cache_dtype, **named)
        assert run(engine.core, random_requests()) == alone, way
        stats = engine.core.stats
        assert (stats.num_cached_tokens > 0) == (way != "chunked"), "prompts that begin alike share pages"
        if way == "draft model":
            assert stats.num_accepted_tokens > 0.3 * stats.num_draft_tokens > 0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kv_cache_dtype", TYPES)
def test_memory_is_of_that_type(make: MakeEngine, folders: dict[str, Path], kv_cache_dtype: str, backend: str) -> None:
    shared = {"num_gpu_blocks_override": 40, "speculate": "draft_model", "draft_model": str(folders["near"]), "k": 2}
    wide, narrow = (make(kv_cache_dtype=kind, attention_backend=backend, **shared) for kind in ("auto", kv_cache_dtype))
    assert 2 * narrow.config.cache_bytes == wide.config.cache_bytes
    for engine, name in ((wide, "float32"), (narrow, kv_cache_dtype)):
        caches = engine.core.runner.caches
        assert {memory.dtype for memory in caches.paged_memory()} == {getattr(torch, name)}
        assert run(engine.core, random_requests(2))["r0"].error is None


@pytest.mark.parametrize("kv_cache_dtype", TYPES)
def test_as_much_memory_holds_twice_the_pages(make: MakeEngine, kv_cache_dtype: str) -> None:
    memory = 64 * 1024 * 8
    wide, narrow = (make(kv_cache_dtype=kind, kv_cache_memory_bytes=memory) for kind in ("auto", kv_cache_dtype))
    assert narrow.config.cache.num_pages - 1 == 2 * (wide.config.cache.num_pages - 1)


@pytest.mark.parametrize("kv_cache_dtype", TYPES)
def test_other_layers_keep_what_they_keep(tmp_path: Path, kv_cache_dtype: str) -> None:
    folder = tiny_models.save(tiny_models.build("qwen3-next"), tmp_path)
    options = EngineOptions(model=str(folder), dtype="float32", max_num_seqs=4, kv_cache_dtype=kv_cache_dtype)
    engine = build_engine(options)
    caches = engine.core.runner.caches
    assert {memory.dtype for memory in caches.paged_memory()} == {getattr(torch, kv_cache_dtype)}
    assert {memory.dtype for memory in caches.row_memory()} == {torch.float32}
    assert all(outcome.error is None for outcome in run(engine.core, random_requests(4)).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp16"}, "kv_cache_dtype must be one of auto, float32, float16, bfloat16, not 'fp16'"),
        ({"dtype": "float64"}, "kv_cache_dtype float16 needs dtype float32, not float64; use auto"),
        ({"dtype": "float64", "kv_cache_dtype": "float32"}, "kv_cache_dtype float32 needs dtype float32, not float64"),
        ({"device": "sim"}, "kv_cache_dtype float16 with dtype float32 needs device cpu, not sim; use auto"),
        ({"attention_backend": "flex"}, "kv_cache_dtype float16 needs attention_backend cpu or reference, not flex"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(make: MakeEngine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{"kv_cache_dtype": "float16", **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_own_type_may_be_named(make: MakeEngine) -> None:
    assert make(kv_cache_dtype="float32").config == make().config
