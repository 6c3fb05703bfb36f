"""Layers with their norms, gates and residuals folded into the products are the same layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.models import fused_layer
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from tests import tiny_models


def generate(folder: Path, **options: Any) -> list[list[int]]:
    defaults = {"model": str(folder), "dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 24}
    core = build_engine(EngineOptions.from_dict({**defaults, **options})).core
    params = SamplingParams(temperature=0.0, seed=0).with_defaults(SamplingParams())
    out: dict[str, list[int]] = {}
    for i, length in enumerate((5, 30, 1, 12, 17)):
        core.add(Request(str(i), tuple(range(3, 3 + length)), params, (), length + 20))
    while core.has_work:
        for update in core.step():
            out.setdefault(update.request_id, []).extend(update.token_ids)
    return [out[str(i)] for i in range(5)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mixtral"])
def test_the_same_tokens_as_layer_by_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    folder = tiny_models.save(tiny_models.build(kind), tmp_path)
    expected = generate(folder)
    ran = []
    forward = fused_layer.FusedLayers.forward
    monkeypatch.setattr(fused_layer, "max_fused_tokens", lambda like, weights: 16)
    monkeypatch.setattr(
        fused_layer.FusedLayers, "forward", lambda *args: ran.append(args[2].shape[0]) or forward(*args)
    )
    assert generate(folder) == expected
    # Experts take the plain way, and so do steps of many tokens.
    assert (max(ran) <= 16 and len(ran) > 10) if kind != "mixtral" else not ran
