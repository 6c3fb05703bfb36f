"""Through the whole engine, target and head as on a GPU: with few launches they draft the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.models import fused_layer
from tests import tiny_models
from tests.models.heads import tiny_heads
from tests.speculate import test_head_drafts


@pytest.mark.parametrize("name", test_head_drafts.HEADS)
def test_what_the_engine_drafts_with_few_launches(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_layers: list[int] = []
    original = fused_layer.FusedLayers._after_projection
    monkeypatch.setattr(fused_layer, "max_fused_tokens", lambda like, weights: 16)
    monkeypatch.setattr(
        fused_layer.FusedLayers,
        "_after_projection",
        lambda *args: num_layers.append(len(args[0].layers)) or original(*args),
    )
    target, head = tmp_path / "target", tmp_path / "head"
    target.mkdir()
    head.mkdir()
    tiny_models.save(tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS), target)
    test_head_drafts.test_what_the_engine_drafts(name, 2, target, head)
    assert num_layers.count(1) > 20
    assert num_layers.count(tiny_heads.NUM_LAYERS) > 5
