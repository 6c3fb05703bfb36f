"""What each architecture makes of the configs its models were published with, and of those it cannot run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.attention.context import NORMED, StepTokens
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.config import EngineOptions, ModelConfig
from slipstream.engine.build import build_engine
from slipstream.errors import ModelError
from slipstream.llm import LLM
from slipstream.models import fused_layer
from slipstream.models.load import build_model, load_weights
from slipstream.models.registry import architecture_of
from slipstream.sampling_params import SamplingParams
from tests import tiny_models

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def read(name: str, **values: Any) -> ModelConfig:
    hf = {"architectures": [f"{name}ForCausalLM"], **SHAPE, **values}
    return architecture_of(hf).read_config(hf)


def test_mistral() -> None:
    assert read("Mistral").windows == (4096,) * 7  # version 0.1 before it was written down
    assert read("Mistral", sliding_window=512).windows == (512,) * 7
    assert read("Mistral", sliding_window=None).windows == ()
    assert read("Mistral", head_dim=32).head_dim == 32  # Nemo
    assert read("Mistral").head_dim == 16


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_qwen_windows(name: str) -> None:
    window = {"sliding_window": 512, "max_window_layers": 5}
    assert read(name, **window, use_sliding_window=False).windows == ()
    assert read(name, **window, use_sliding_window=True).windows == (0, 0, 0, 0, 0, 512, 512)
    types = ["full_attention", "sliding_attention"] * 3 + ["full_attention"]
    config = read(name, **window, use_sliding_window=True, layer_types=types)
    assert config.windows == (0, 512, 0, 512, 0, 512, 0)


def test_gemma3_as_published_and_as_written_today() -> None:
    published = {
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "rope_theta": 1000000,
        "rope_local_base_freq": 20000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 512,
        "sliding_window_pattern": 3,
    }
    config = read("Gemma3", **published)
    assert config.windows == (512, 512, 0, 512, 512, 0, 512)
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (1e6, "linear", 8.0)
    assert config.window_rope is not None
    assert (config.window_rope.theta, config.window_rope.kind) == (2e4, "default")
    assert config.tie_embeddings
    assert config.embedding_scale == 8.0
    assert config.attention_scale == pytest.approx(32**-0.5)
    assert config.activation == "gelu_tanh"
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"):
        del published[key]
    today = {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }
    assert read("Gemma3", **published, **today) == config


def test_experts_in_some_layers() -> None:
    def layers(**values: Any) -> tuple[int, ...]:
        experts = read("Qwen3Moe", **EXPERTS, **values).experts
        assert experts is not None
        return experts.layer_ids

    assert layers() == (0, 1, 2, 3, 4, 5, 6)
    assert layers(decoder_sparse_step=2) == (1, 3, 5)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == (1, 5)
    mixtral = read("Mixtral", num_local_experts=8, num_experts_per_tok=2).experts
    assert mixtral is not None
    assert mixtral.layer_ids == (0, 1, 2, 3, 4, 5, 6)
    assert mixtral.routing.renormalise
    assert mixtral.intermediate_size == 96
    qwen = read("Qwen3Moe", **EXPERTS).experts
    assert qwen is not None
    assert not qwen.routing.renormalise
    assert qwen.intermediate_size == 24


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("Llama", {"hidden_act": "relu"}, "activation 'relu'.*silu, gelu_pytorch_tanh"),
        ("Mistral", {"sliding_window": 0}, "no valid 'sliding_window'"),
        ("Gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3", {"layer_types": ["full_attention"]}, "layer_types.*7 layers"),
        ("Gemma3", {"layer_types": ["chunked_attention"] * 7}, "layer_types"),
        ("Mixtral", {"num_experts_per_tok": 2}, "no valid 'num_local_experts'"),
        ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
        ("Qwen3Moe", {**EXPERTS, "hidden_act": "gelu_pytorch_tanh"}, "not supported for experts"),
        ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": None}, "no valid 'moe_intermediate_size'"),
    ],
)
def test_what_is_missing_or_not_supported_is_named(name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(name, **values)


def test_a_joined_projection_of_the_wrong_size_is_named(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.build("phi3"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_key_value_heads": 3}))
    with pytest.raises(ModelError, match=r"qkv_proj.weight' has 80 rows, the config says 96"):
        build_engine(EngineOptions(model=str(tmp_path), dtype="float32"))


@pytest.mark.parametrize("variant", ["mistral-window", "gemma3", "mixtral-window-tied", "qwen3-moe", "phi3-longrope"])
def test_chunks_and_company_change_nothing(tmp_path: Path, variant: str) -> None:
    """Prompts longer than the window, in one piece and alone, then in small pieces and together."""
    tiny_models.save(tiny_models.build(variant), tmp_path)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (70, 45, 3)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"model": str(tmp_path), "dtype": "float64"}
    with LLM(**options, max_num_seqs=1) as llm:
        alone = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM(**options, long_prefill_token_threshold=7, max_num_batched_tokens=16, max_num_seqs=3) as llm:
        together = [output.token_ids for output in llm.generate(prompts, params)]
    assert together == alone


@pytest.mark.parametrize("variant", ["gemma3", "mixtral", "phi3-longrope", "llama-dynamic-rope"])
def test_16_bit_models_keep_their_tables_wide(tmp_path: Path, variant: str) -> None:
    reference = tiny_models.save(tiny_models.build(variant).to(torch.bfloat16), tmp_path)
    checkpoint = open_checkpoint(reference)
    config = replace(build_engine(EngineOptions(model=str(tmp_path))).config, dtype="bfloat16")
    model = build_model(architecture_of(checkpoint.config), config, torch.device("cpu"))
    load_weights(model, checkpoint.tensors())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {table.dtype for table in model.cos_sin} == {torch.float32}
    stored = dict(checkpoint.tensors())["model.norm.weight"]
    expected = (stored.float() + 1).bfloat16() if variant == "gemma3" else stored
    assert torch.equal(model.model.norm.weight, expected)


def test_layers_without_a_window_share_one_rope_table(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.build("gemma3"), tmp_path)
    model: Any = build_engine(EngineOptions(model=str(tmp_path), dtype="float32")).core.runner.program.model
    first, second, third = model.cos_sin
    assert first is third
    assert not torch.equal(first, second)
    assert [layer.self_attn.layer.window for layer in model.model.layers] == [32, 0, 32]


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
@pytest.mark.parametrize(("dtype", "max_fused"), [("float32", 0), ("float64", 0), ("float64", 16)])
def test_taps_show_the_stream_between_layers(
    monkeypatch: pytest.MonkeyPatch, variant: str, dtype: str, max_fused: int, tmp_path: Path
) -> None:
    """Against the hidden states that transformers gives; its rope is float32 at best, whatever the type here."""
    monkeypatch.setattr(fused_layer, "max_fused_tokens", lambda like, weights: max_fused)
    reference = tiny_models.build(variant)
    folder = tiny_models.save(reference, tmp_path)
    engine = build_engine(EngineOptions(model=str(folder), dtype=dtype, max_model_len=16))
    runner, token_ids = engine.core.runner, [3, 200, 7, 7, 90, 11]
    n, page_size, num_layers = len(token_ids), engine.config.cache.page_size, engine.config.model.num_layers
    lens = torch.tensor([n], dtype=torch.int32)
    starts, positions = torch.tensor([0, n], dtype=torch.int32), torch.arange(n)
    metadata = CommonAttentionMetadata(
        *(1, n, n, starts, starts.numpy(), lens, lens, lens.numpy()),
        block_table=torch.ones(1, 1, dtype=torch.int32),
        slot_mapping=positions + page_size,
        batch_rows=torch.zeros(1, dtype=torch.int32),
    )
    size = engine.config.model.hidden_size
    wide = torch.zeros(n, size * (num_layers + 2), dtype=getattr(torch, dtype))
    taps = dict(zip([*range(num_layers + 1), NORMED], wide.split(size, dim=1), strict=True))
    context = runner.caches.begin(StepTokens(positions, metadata.slot_mapping, metadata), taps)
    with torch.inference_mode():
        hidden = runner.program.model.forward(torch.tensor(token_ids, dtype=torch.int32), context)
        states = reference(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    for idx, state in enumerate(states[:-1]):  # the last one is normed
        torch.testing.assert_close(taps[idx].float(), state[0], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(taps[NORMED].float(), states[-1][0], rtol=2e-4, atol=2e-4)
    assert torch.equal(taps[NORMED], hidden)
