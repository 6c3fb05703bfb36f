"""All layers of a decoder with cross attention in one call give what the layers give one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.attention.context import StepTokens
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.kernels import native
from slipstream.models.whisper import Whisper
from slipstream.plan import EncoderRun
from tests import tiny_whisper
from tests.contexts import one_prompt

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C kernels here")


@torch.inference_mode()
def test_all_and_the_first_layers(tmp_path: Path) -> None:
    """The states after all layers and after the first two, and what taps receive before each layer."""
    folder = tiny_whisper.save(tiny_whisper.build(), tmp_path)
    engine = build_engine(EngineOptions(model=str(folder), dtype="float32", max_num_seqs=1))
    runner, model = engine.core.runner, engine.core.runner.program.model
    assert isinstance(model, Whisper) and model.cross_stack is not None
    rows, num_tokens, num_entries = runner.rows.encoder, 7, tiny_whisper.MAX_ENTRIES
    assert rows is not None and runner.encoder is not None
    page_size = engine.config.cache.page_size
    rows.page_table[0] = torch.arange(2, 2 + -(-num_entries // page_size))
    rows.lens[0] = num_entries
    runner.encoder.run([EncoderRun(0, tiny_whisper.make_prompts(1)[0].encoder, num_entries)])
    tokens = one_prompt(num_tokens, page_size)
    assert tokens.common is not None
    common = replace(tokens.common, encoder=rows, batch_rows=torch.zeros(1, dtype=torch.int32))
    tokens, results = StepTokens(tokens.positions, tokens.slot_mapping, common), []
    for stack in (model.cross_stack, None):
        model.cross_stack = stack
        for num_layers in (2, 3):
            taps = {i: torch.zeros(num_tokens, model.config.hidden_size) for i in range(num_layers)}
            context = runner.caches.begin(tokens, taps)
            hidden = model.forward_first(torch.arange(100, 100 + num_tokens).int(), context, num_layers)
            results.append([hidden, *taps.values()])
    for at_once, one_by_one in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(at_once, one_by_one, rtol=1e-5, atol=1e-5)
