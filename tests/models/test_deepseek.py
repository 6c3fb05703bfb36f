"""DeepSeek: configs as published, both ways of attending, chunks of prompts, chosen keys, MTP layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.attention import mla
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.attention.mla import LatentSpec
from slipstream.attention.sparse_mla import SparseLatentSpec
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.errors import ConfigError, ModelError
from slipstream.llm import LLM
from slipstream.models.registry import architecture_of
from slipstream.sampling_params import SamplingParams
from tests import tiny_models
from tests.contexts import one_prompt
from tests.models.heads.tiny_deepseek import random_mtp, write_target
from tests.models.test_parity import all_logits

# As published, but for keys that nothing here reads.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


def read(**changes: Any) -> Any:
    config = V2_LITE | changes
    return architecture_of(config).read_config(config)


def test_v2_lite_as_published() -> None:
    config = read()
    spec = config.cache_specs[0]
    assert isinstance(spec, LatentSpec)
    assert set(config.cache_specs) == {spec}
    assert (spec.latent_dim, spec.rope_dim, spec.query_rank, spec.num_heads) == (512, 64, 0, 16)
    # 576 numbers a token and layer.
    assert config.kv_bytes_per_token("bfloat16") == 27 * 1152
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert config.rope.attention_factor == 1.0
    assert config.rope.rotary_dim == 64
    assert config.experts.layer_ids == tuple(range(1, 27))
    assert (config.experts.shared_size, config.experts.shared_gate) == (2816, False)
    routing = config.experts.routing
    assert (routing.scoring, routing.has_groups, routing.renormalise, routing.has_bias) == (
        "softmax",
        False,
        False,
        False,
    )


def test_v3_as_published() -> None:
    config = read(
        architectures=["DeepseekV3ForCausalLM"],
        q_lora_rank=1536,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        first_k_dense_replace=3,
        rope_scaling=V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    )
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.874, rel=1e-3)
    routing = config.experts.routing
    assert (routing.scoring, routing.num_groups, routing.num_kept_groups) == ("sigmoid", 8, 4)
    assert (routing.has_bias, routing.renormalise, routing.scale, routing.group_score) == (True, True, 2.5, "top2")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' in config.json is not supported"),
        ({"qk_rope_head_dim": 63}, "rotates 63 dimensions"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"attention_bias": True}, "attention_bias without q_lora_rank"),
        ({"num_experts_per_tok": 65}, "65 of 64 experts"),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, "factor"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "no q_lora_rank"),
        (
            {"architectures": ["DeepseekV32ForCausalLM"], "q_lora_rank": 9, "index_head_dim": 32},
            "rotates 64 of the indexer's 32",
        ),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read(**changes)


def test_v32_as_published() -> None:
    config = read(
        architectures=["DeepseekV32ForCausalLM"],
        q_lora_rank=1536,
        n_group=8,
        topk_group=4,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=2048,
    )
    spec = config.cache_specs[0]
    assert isinstance(spec, SparseLatentSpec)
    assert (spec.index_heads, spec.index_dim, spec.top_k) == (64, 128, 2048)
    # The indexer's key comes after a token's latent, in the same pages.
    assert config.kv_bytes_per_token("bfloat16") == 27 * (1152 + 256)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("deepseek-v3", "deepseek-v3.2")
    return {name: tiny_models.save(tiny_models.build(name), tmp_path_factory.mktemp("deepseek")) for name in names}


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["deepseek-v3"]


PROMPT = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(1)).tolist()


def engine_of(folder: Path, **options: Any) -> Engine:
    return build_engine(EngineOptions.from_dict({"model": str(folder), "dtype": "float32", **options}))


def expected_tokens(variant: str, count: int) -> list[int]:
    reference = tiny_models.build(variant)
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        made = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return list(made[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("chunk", [3, 16, 512])
@pytest.mark.parametrize("variant", ["deepseek-v3", "deepseek-v3.2"])
def test_prompts_in_chunks(folders: dict[str, Path], variant: str, chunk: int) -> None:
    """Three tokens a chunk are absorbed, sixteen too, the whole prompt is not. V3.2 attends to 24 keys a token."""
    with LLM(build=lambda: engine_of(folders[variant], long_prefill_token_threshold=chunk)) as llm:
        output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))[0]
    assert output.token_ids == expected_tokens(variant, 64)


@pytest.mark.parametrize("length", [23, 24, 25, 60])
def test_as_many_keys_as_are_chosen_and_one_more(folders: dict[str, Path], length: int) -> None:
    """Up to 24 keys all are chosen, without a score."""
    with torch.inference_mode():
        expected = tiny_models.build("deepseek-v3.2")(torch.tensor([PROMPT[:length]])).logits[0]
    found = all_logits(engine_of(folders["deepseek-v3.2"]), PROMPT[:length])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("absorbed", "workspace"), [(0, 8192), (0, 7), (1000, 8192)])
def test_both_ways_and_any_chunk_of_keys(
    folder: Path, absorbed: int, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla, "MAX_ABSORBED", absorbed)
    monkeypatch.setattr(mla, "WORKSPACE_KEYS", workspace)
    with torch.inference_mode():
        expected = tiny_models.build("deepseek-v3")(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(engine_of(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_a_pass_is_cut_into_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that decode, prompts that fit into the workspace together, one that does not; and padding after them."""
    monkeypatch.setattr(mla, "WORKSPACE_KEYS", 100)
    lens, bounds = [1, 2, 20, 30, 40, 90, 4], [50, 7, 20, 33, 40, 250, 4]
    starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    common = CommonAttentionMetadata(
        num_reqs=len(lens),
        num_actual_tokens=sum(lens),
        max_query_len=max(lens),
        query_start_loc=torch.cat([starts, starts[-1:]]),
        query_start_loc_cpu=starts.numpy(),
        query_lens=torch.tensor([*lens, 0], dtype=torch.int32),
        seq_lens=torch.tensor([*bounds, 0], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(bounds, dtype=torch.int32).numpy(),
        block_table=torch.zeros(len(lens) + 1, 20, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(lens) + 3, dtype=torch.int64),
    )
    runs = mla.LatentMetadata.build(common, 4).runs
    assert [(run.tokens.start, run.tokens.stop) for run in runs] == [(0, 3), (3, 53), (53, 93), (93, 183), (183, 187)]
    assert [list(map(tuple, run.chunks)) for run in runs] == [
        [],
        [(0, 33)],
        [(0, 40)],
        [(0, 100), (100, 100), (200, 50)],
        [],
    ]
    assert [run.requests.query_start_loc.tolist() for run in runs[1:3]] == [[0, 20, 50], [0, 40]]
    assert [run.max_query_len for run in runs] == [2, 30, 40, 90, 4]


def test_a_drafter_shares_a_pass_but_for_its_gaps() -> None:
    common = one_prompt(9, page_size=4).common
    assert common is not None
    built, gaps = mla.LatentMetadata.build(common, 4), torch.tensor([5], dtype=torch.int32)
    adapted = built.starting_at(gaps)
    assert adapted.tables is built.tables
    assert (adapted.runs[0].requests.seq_starts, built.runs[0].requests.seq_starts) == (gaps, None)


@torch.inference_mode()
@pytest.mark.parametrize(("variant", "num_layers"), [("deepseek-v3", 1), ("deepseek-v3", 2), ("deepseek-v3.2", 1)])
def test_mtp_layers_are_decoder_layers_after_two_norms_and_a_product(
    tmp_path: Path, variant: str, num_layers: int
) -> None:
    layers = [random_mtp(9 + idx, variant=variant) for idx in range(num_layers)]
    target = write_target(tmp_path, layers, variant=variant)
    engine = engine_of(tmp_path, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    head = engine.core.runner.speculator._head  # type: ignore[attr-defined]
    caches = engine.core.runner.speculator.caches  # type: ignore[attr-defined]
    ids = torch.randint(0, 256, (33,), generator=torch.Generator().manual_seed(2))
    hidden = target.model(ids[None, :-1]).last_hidden_state[0]
    embedded = target.get_input_embeddings()(ids[1:])
    for idx, layer in enumerate(layers):
        context = caches.begin(one_prompt(32, page_size=16))
        made = head.forward(idx, ids[1:].to(torch.int32), hidden, context)
        torch.testing.assert_close(made, layer.states(embedded, hidden), rtol=1e-4, atol=1e-4)


def test_what_latents_do_not_go_with(folder: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend flex has no latent attention"):
        engine_of(folder, attention_backend="flex")
    on_sim = {"device": "sim", "dtype": "float64", "num_gpu_blocks_override": 64, "cudagraph_mode": "none"}
    with pytest.raises(ConfigError, match="cascade always needs keys of grouped-query attention"):
        engine_of(folder, attention_backend="triton", cascade="always", **on_sim)
