from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.conftest import TAPS, build_target, open_target_model


def test_states_are_those_of_transformers(target: Path) -> None:
    target_model, reference = open_target_model(target), build_target().double()
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 256, (3, 32), generator=generator)
    hidden = target_model.read(token_ids)
    with torch.no_grad():
        expected = reference(token_ids, output_hidden_states=True)
    taps = torch.cat([expected.hidden_states[tap] for tap in TAPS], dim=-1)
    torch.testing.assert_close(hidden.features, taps, rtol=1e-4, atol=1e-5)  # transformers rotates in float32
    logits = hidden.normed @ target_model.head.T
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    greedy = target_model.greedy(hidden.normed.flatten(0, 1))
    assert torch.equal(greedy, logits.flatten(0, 1).argmax(dim=-1))
    assert not hidden.features.requires_grad and not hidden.features.is_inference()


def test_large_batches_are_computed_in_parts(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target_model = open_target_model(target)
    token_ids = torch.randint(0, 256, (5, 32), generator=torch.Generator().manual_seed(2))
    whole = target_model.read(token_ids)
    monkeypatch.setattr("slipstream.train.target._MAX_TOKENS", 70)
    for part, expected in zip(target_model.read(token_ids), whole, strict=True):
        torch.testing.assert_close(part, expected)


def test_padding_changes_nothing_before_it(target: Path) -> None:
    target_model = open_target_model(target)
    token_ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    whole = target_model.read(token_ids).features.clone()
    token_ids[0, 20:] = 0
    cut = target_model.read(token_ids).features
    torch.testing.assert_close(cut[0, :20], whole[0, :20])
    torch.testing.assert_close(cut[1], whole[1])
