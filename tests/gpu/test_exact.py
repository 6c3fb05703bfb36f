"""Exact mode on a GPU: kernels and whole engines give the same bits, however tokens are put together.

``benchmarks/exact.py`` does the same over the shapes of published models and over Spec-Bench.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exact_kernels import check_kernels
from slipstream.attention.backends.triton import ExactTritonBackend
from slipstream.engine.build import build_engine
from slipstream.kernels.linear.exact_linear import Tokens, launch_tile
from slipstream.kernels.linear.exact_tiles import cut_of, keeps_cut
from slipstream.kernels.linear.small_linear import Epilogue, Tile
from slipstream.sampling.exact_logprobs import pack_exact_logprobs
from tests.engine.drive import make_request, run

try:
    from lossless_fuzz import describe_difference, run_fuzz
    from lossless_fuzz_engines import EXACT_DRAFTERS
    from lossless_fuzz_runs import Settings
    from tests.sim import tiny_engines
except ImportError:  # transformers writes the tiny models
    tiny_engines = None  # type: ignore[assignment]

pytestmark = pytest.mark.gpu
# mma.sync and wgmma, tokens few and many, columns read few and many at once, by few warps and many.
STREAMED = [
    Tile(tokens, rows, columns, num_warps, stages)
    for tokens, rows, columns, num_warps, stages in (
        *((8, 16, 64, 1, 4), (8, 16, 64, 2, 3), (16, 32, 64, 4, 3), (16, 64, 32, 4, 3), (32, 64, 64, 4, 3)),
        *((64, 64, 64, 4, 3), (64, 128, 64, 8, 3), (128, 128, 64, 8, 3), (128, 64, 64, 4, 2), (16, 64, 128, 4, 3)),
    )
]
HELD = [Tile(8, 16, 0, 4, 1), Tile(16, 16, 0, 4, 1), Tile(8, 32, 0, 4, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("in_size", [576, 1536, 2048, 4096, 100])
def test_every_tile_of_a_cut_gives_the_same(in_size: int, dtype: torch.dtype) -> None:
    """What the whole mode stands on: along the columns tensor cores add in one order, whatever the tile."""
    cut = cut_of(in_size)
    tiles = [tile for tile in (*STREAMED, *HELD) if keeps_cut(tile, cut)]
    assert len(tiles) >= 8
    x = torch.randn(8, in_size, dtype=dtype, device="cuda")
    weight = torch.randn(512, in_size, dtype=dtype, device="cuda")
    made = [launch_tile(Tokens(x), weight, Epilogue(), True, cut, tile).out for tile in tiles]
    assert [tile for tile, out in zip(tiles, made, strict=True) if not torch.equal(out, made[0])] == []


@pytest.mark.parametrize("model", ["tiny", "smollm2-135m", "qwen3-30b-a3b"])
def test_rows_of_every_kernel(model: str) -> None:
    rows = check_kernels(model, torch.device("cuda"), 1000, 30)
    *others, planted = rows
    assert [row for row in others if row["equal"] < row["compared"]] == []
    assert planted["kernel"] == "planted cut"
    assert planted["is_found"] or cut_of(576).parts > 1, "a sum of several parts may be cut as it is"


def test_log_probabilities_of_a_row() -> None:
    """Of a vocabulary whose rows begin anywhere in memory, with equal values."""
    logits = torch.randn(40, 50_257, device="cuda").round(decimals=1)
    ids = torch.randint(0, 50_257, (40,), device="cuda")
    whole = pack_exact_logprobs(logits, ids)
    for i in range(0, 40, 7):
        assert torch.equal(pack_exact_logprobs(logits[i : i + 1].clone(), ids[i : i + 1]), whole[i : i + 1])
    expected = logits.double().log_softmax(1).gather(1, ids.unsqueeze(1))
    own = whole[:, 22:23].contiguous().view(torch.float32)
    torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(tiny_engines is None, reason="transformers writes the tiny models")
@pytest.mark.parametrize("graphs", ["none", "full"])
def test_an_engine_in_exact_mode(tmp_path: Path, graphs: str) -> None:
    """Its layers are the exact ones, for one token and for many; and its texts are the same alone and together."""
    folders = tiny_engines.write(tmp_path)
    common = {"exact": True, "device": "cuda", "dtype": "bfloat16", "cudagraph_mode": graphs}
    common |= {"gpu_memory_utilization": 0.3}
    prompts = [[5, 9, 5, 9, i] * (1 + 3 * i) for i in range(4)]
    requests = [make_request(f"r{i}", own, 16, seed=i, temperature=0.7 * (i % 2)) for i, own in enumerate(prompts)]
    engine = build_engine(tiny_engines.options_of(folders, "ngram", **{**tiny_engines.SMALL, **common}))
    assert isinstance(engine.core.runner.caches.groups[0].backend.attention, ExactTritonBackend)
    while engine.core.use_idle_time():
        pass
    together = run(engine.core, requests)
    for request in requests:
        alone = build_engine(tiny_engines.options_of(folders, "none", **{**tiny_engines.SMALL, **common}))
        assert run(alone.core, [request])[request.request_id] == together[request.request_id]


@pytest.mark.skipif(tiny_engines is None, reason="transformers writes the tiny models")
def test_random_requests_with_every_drafter() -> None:
    settings = Settings(num_requests=36, seed=5, per_engine=6, drafters=EXACT_DRAFTERS, device="cuda", exact=True)
    outcome = run_fuzz(settings)
    assert [describe_difference(difference, "") for difference in outcome.differences] == []
    assert sum(tally.num_accepted for tally in outcome.tallies.values()) > 20
