"""Tiny heads over a tiny target, as files, and the requests they draft for; used by the suites of the methods."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.request import Request
from tests import tiny_models
from tests.engine.drive import make_request, run
from tests.models.heads import tiny_heads

LONG = {"max_position_embeddings": 512}
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 2, "min_tokens": 3},
]


def write_target(folder: Path) -> Path:
    return tiny_models.save(tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS), folder)


def write_with_mtp(folder: Path, case: tiny_heads.Case) -> Path:
    """A target whose checkpoint carries MTP layers."""
    model = tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS)
    tiny_models.save(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**case.config, **config}))
    own = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(own | {n: t.float() for n, t in case.tensors.items()}, folder / "model.safetensors")
    return folder


def some_requests(count: int = 18) -> list[Request]:
    rng = random.Random(5)
    requests = []
    for i in range(count):
        own = [rng.randrange(256) for _ in range(rng.choice([1, 5, 17, 40]))]
        stops = tuple(rng.sample(range(256), 5)) if i % 4 == 0 else ()
        kind = KINDS[i % len(KINDS)]
        requests.append(make_request(f"r{i}", own * rng.choice([1, 3]), rng.choice([1, 9, 40]), stops, seed=i, **kind))
    return requests


def tokens_of(engine: Engine) -> dict[str, list[int]]:
    return {i: outcome.token_ids for i, outcome in run(engine.core, some_requests()).items()}


def tokens_of_the_cpu(folder: Path) -> dict[str, list[int]]:
    options = {"model": str(folder), "device": "cpu", "dtype": "float64", "max_num_seqs": 16}
    return tokens_of(build_engine(EngineOptions.from_dict(options)))


def check(
    folder: Path,
    expected: dict[str, list[int]],
    make: Callable[[], dict[str, Any]],
    least_drafts: int = 100,
    **options: Any,
) -> None:
    """The tokens of the CPU, before and after every size has its graph; no wait that the guard would see."""
    small = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
    given = {"model": str(folder), **small, "cudagraph_capture_sizes": SIZES, "speculative_config": make(), **options}
    engine = build_engine(EngineOptions.from_dict(given))
    assert tokens_of(engine) == expected
    assert engine.core.stats.num_draft_tokens > least_drafts
    while engine.core.use_idle_time():
        pass
    assert tokens_of(engine) == expected
    assert engine.core.stats.num_sync_violations == 0
    engine.core.scheduler.check_idle()
