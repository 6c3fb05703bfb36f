"""The same logits and the same greedy tokens as ``transformers``, for every architecture and its variants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.attention.context import StepTokens
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.llm import LLM
from slipstream.sampling_params import SamplingParams
from tests import tiny_models


def all_logits(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position of one sequence, in a single pass."""
    n, page_size = len(token_ids), engine.config.cache.page_size
    num_pages = -(-n // page_size)
    runner = engine.core.runner
    positions = torch.arange(n)
    metadata = CommonAttentionMetadata(
        num_reqs=1,
        num_actual_tokens=n,
        max_query_len=n,
        query_start_loc=torch.tensor([0, n], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, n], dtype=torch.int32).numpy(),
        query_lens=torch.tensor([n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([n], dtype=torch.int32).numpy(),
        block_table=torch.arange(1, num_pages + 1, dtype=torch.int32).unsqueeze(0),
        slot_mapping=positions + page_size,
        batch_rows=torch.zeros(1, dtype=torch.int32),
    )
    context = runner.caches.begin(StepTokens(positions, metadata.slot_mapping, metadata))
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
