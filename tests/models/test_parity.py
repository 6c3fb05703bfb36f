"""The same logits and the same greedy tokens as ``transformers``, for every architecture and its variants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.llm import LLM
from slipstream.sampling_params import SamplingParams
from tests import tiny_models
from tests.contexts import one_prompt


def all_logits(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position of one sequence, in a single pass."""
    runner = engine.core.runner
    context = runner.caches.begin(one_prompt(len(token_ids), engine.config.cache.page_size))
    with torch.inference_mode():
        hidden = runner.program.model.forward(torch.tensor(token_ids, dtype=torch.int32), context)
        return runner.program.model.compute_logits(hidden)


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_logits_and_greedy_tokens(variant: str, tmp_path: Path) -> None:
    reference = tiny_models.build(variant)
    # Small shards, so that every variant is also a test of sharded files.
    tiny_models.save(reference, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine = build_engine(EngineOptions(model=str(tmp_path), dtype="float32"))

    prompt = torch.randint(0, 256, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(prompt).logits[0]
    torch.testing.assert_close(all_logits(engine, prompt[0].tolist()), expected, rtol=1e-4, atol=1e-4)

    short = prompt[:, :20]
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    tokens = reference.generate(short, attention_mask=torch.ones_like(short), do_sample=False, max_new_tokens=64)
    with LLM(build=lambda: engine) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        output = llm.generate(short[0].tolist(), params)[0]
    assert output.token_ids == tokens[0, 20:].tolist()
    assert len(output.token_ids) == 64
    assert len(set(output.token_ids)) > 8, "a stuck model would prove nothing"
