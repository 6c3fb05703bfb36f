"""GGUF files of every architecture give the logits of the ``transformers`` model they were written from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.checkpoints.gguf import GGUFCheckpoint
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.errors import ModelError
from tests import tiny_models
from tests.checkpoints.tiny_gguf import permuted_for_llama
from tests.models.test_parity import all_logits

Metadata = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A tiny model, and the metadata that llama.cpp's converter writes for it beside the usual."""

    variant: str
    arch: str
    model_class: str
    metadata: Metadata = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    factors: dict[str, list[float]] = field(default_factory=dict)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
MIXTRAL = {"expert_count": 5, "expert_used_count": 2}
QWEN3_MOE = {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 24}
GEMMA3 = {"attention.sliding_window": 32, "attention.sliding_window_pattern": 2}
ATTENTION_FACTOR = (1 + np.log(512 / 16) / np.log(16)) ** 0.5

CASES = {
    "llama": Case("llama-tied", "llama", "LlamaForCausalLM"),
    "llama-yarn": Case(
        "llama-yarn-rope",
        "llama",
        "LlamaForCausalLM",
        {**YARN, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 0.5},
    ),
    "llama-linear": Case(
        "llama-linear-rope", "llama", "LlamaForCausalLM", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    ),
    "mistral": Case("mistral-window", "llama", "MistralForCausalLM", {"attention.sliding_window": 32}),
    "mixtral": Case("mixtral", "llama", "MixtralForCausalLM", MIXTRAL),
    "qwen3": Case("qwen3-wide-heads-bias", "qwen3", "Qwen3ForCausalLM", {}, {"attention_bias": False}),
    "qwen3-moe": Case("qwen3-moe", "qwen3moe", "Qwen3MoeForCausalLM", QWEN3_MOE, {"mlp_only_layers": []}),
    "gemma3": Case("gemma3", "gemma3", "Gemma3ForCausalLM", GEMMA3, {"query_pre_attn_scalar": 8}),
    "gemma3-pattern-as-list": Case(
        "gemma3",
        "gemma3",
        "Gemma3ForCausalLM",
        {**GEMMA3, "attention.sliding_window_pattern": [True, False, True]},
        {"query_pre_attn_scalar": 8},
    ),
    "gemma3-linear": Case(
        "gemma3-untied-no-gqa-linear-rope",
        "gemma3",
        "Gemma3ForCausalLM",
        {**GEMMA3, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {"query_pre_attn_scalar": 8, "attention_bias": False},
    ),
    "phi3": Case(
        "phi3-window-partial-rotary-tied",
        "phi3",
        "Phi3ForCausalLM",
        {"attention.sliding_window": 32, "rope.dimension_count": 4},
    ),
    "phi3-longrope": Case(
        "phi3-longrope",
        "phi3",
        "Phi3ForCausalLM",
        {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": ATTENTION_FACTOR},
        {},
        {"short": [1.0, 1.1, 1.3, 1.7], "long": [1.0, 1.9, 5.5, 14.0]},
    ),
}


def converted(model: PreTrainedModel, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """The weights as llama.cpp's converter stores them, under the names the ``gguf`` package gives them."""
    config = model.config
    by_name = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_name[arch], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        parts = {name: array}
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=1)
            parts = {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        elif arch == "gemma3" and "norm" in name:
            parts = {name: array + 1}
        elif arch == "llama" and ".q_proj." in name:
            parts = {name: permuted_for_llama(array, config.num_attention_heads)}
        elif arch == "llama" and ".k_proj." in name:
            parts = {name: permuted_for_llama(array, config.num_key_value_heads)}
        for part, value in parts.items():
            # The package knows experts' names with a suffix, as checkpoints had them.
            known = names.get_name(
                part if part.endswith(("weight", "bias")) else f"{part}.weight", (".weight", ".bias")
            )
            assert known is not None, part
            yield known, value


def write(
    path: Path,
    arch: str,
    model: PreTrainedModel,
    metadata: Metadata,
    tensors: dict[str, np.ndarray],
    packed: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    config = model.config
    rope = config.rope_parameters
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in metadata.items():
        writer.add_key_value(f"{arch}.{key}", value, *_type(value))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    words = [*alphabet, "ab"]
    controls = [f"<{idx}>" for idx in range(tiny_models.VOCAB_SIZE - len(words))]
    writer.add_token_list(words + controls)
    writer.add_token_types([1] * len(words) + [3] * len(controls))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tiny_models.EOS_ID)
    writer.add_pad_token_id(0)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    for name, (array, kind) in (packed or {}).items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type(value: Any) -> tuple[gguf.GGUFValueType, ...]:
    kinds = {str: gguf.GGUFValueType.STRING, bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32}
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, kinds[type(value[0])]
    return (kinds.get(type(value), gguf.GGUFValueType.FLOAT32),)


def factor_tensors(case: Case) -> dict[str, np.ndarray]:
    return {f"rope_factors_{kind}.weight": np.array(values, np.float32) for kind, values in case.factors.items()}


def check_logits(path: Path, reference: PreTrainedModel) -> None:
    prompt = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(prompt).logits[0]
    engine = build_engine(EngineOptions(model=str(path), dtype="float32"))
    torch.testing.assert_close(all_logits(engine, prompt[0].tolist()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_the_model_it_was_written_from(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    reference = tiny_models.build(case.variant, **case.changes)
    tensors = {**dict(converted(reference, case.arch)), **factor_tensors(case)}
    path = write(tmp_path / "m.gguf", case.arch, reference, case.metadata, tensors)
    assert open_checkpoint(path).config["architectures"] == [case.model_class]
    check_logits(path, reference)


def test_experts_of_old_files_one_by_one(tmp_path: Path) -> None:
    reference = tiny_models.build("mixtral")
    tensors = {}
    for name, array in converted(reference, "llama"):
        if "_exps." in name:
            tensors |= {name.replace("_exps", f".{idx}"): part for idx, part in enumerate(array)}
        else:
            tensors[name] = array
    assert "blk.2.ffn_down.4.weight" in tensors
    check_logits(write(tmp_path / "m.gguf", "llama", reference, MIXTRAL, tensors), reference)


def test_stacked_experts_are_decoded_one_by_one(tmp_path: Path) -> None:
    reference = tiny_models.build("mixtral", hidden_size=64, num_attention_heads=8)
    tensors = dict(converted(reference, "llama"))
    name, kind = "blk.2.ffn_up_exps.weight", gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(tensors.pop(name), kind)
    path = write(tmp_path / "m.gguf", "llama", reference, MIXTRAL, tensors, {name: (packed, kind)})
    checkpoint = open_checkpoint(path)
    loaded = dict(checkpoint.tensors())
    assert list(loaded) == checkpoint.tensor_names()
    for idx, expected in enumerate(gguf.quants.dequantize(packed, kind)):
        expert = loaded[f"model.layers.2.mlp.experts.{idx}.up_proj.weight"]
        assert np.array_equal(expert.numpy(), expected)


THEIRS = {
    # transformers reads neither the size of experts nor which layers are dense; these are what it takes for granted.
    "qwen3moe": ("qwen3-moe", {"moe_intermediate_size": 768, "mlp_only_layers": []}, QWEN3_MOE),
    "gemma3": ("gemma3", {}, {"attention.sliding_window": 32}),
    "phi3": ("phi3", {}, {}),
}


@pytest.mark.parametrize("arch", THEIRS)
def test_weights_equal_those_transformers_reads(tmp_path: Path, arch: str) -> None:
    from transformers import AutoModelForCausalLM

    variant, changes, metadata = THEIRS[arch]
    tensors = dict(converted(tiny_models.build(variant, **changes), arch))
    path = write(tmp_path / "m.gguf", arch, tiny_models.build(variant, **changes), metadata, tensors)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    for name in [name for name in expected if name.endswith("experts.gate_up_proj")]:
        for idx, matrix in enumerate(expected.pop(name)):
            gate, up = matrix.chunk(2)
            expected[name.replace("gate_up_proj", f"{idx}.gate_proj.weight")] = gate
            expected[name.replace("gate_up_proj", f"{idx}.up_proj.weight")] = up
    for name in [name for name in expected if name.endswith("experts.down_proj")]:
        for idx, matrix in enumerate(expected.pop(name)):
            expected[name.replace("down_proj", f"{idx}.down_proj.weight")] = matrix
    loaded = dict(open_checkpoint(path).tensors())
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name


def test_gemma3_27b_scales_its_scores_by_narrower_heads(tmp_path: Path) -> None:
    reference = tiny_models.build("gemma3")
    tensors = dict(converted(reference, "gemma3"))
    reference.config.num_hidden_layers = 62
    reference.config.hidden_size, reference.config.num_attention_heads = 5376, 32
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", "gemma3", reference, GEMMA3, tensors))
    assert checkpoint.config["query_pre_attn_scalar"] == 168
    assert checkpoint.config["rope_local_base_freq"] == 10000.0


@pytest.mark.parametrize(
    ("arch", "variant", "metadata", "extra", "message"),
    [
        ("phi3", "phi3", {"rope.scaling.type": "longrope"}, {}, "longrope"),
        ("llama", "llama", {}, {"blk.0.ffn_gate_inp.weight": np.zeros((2, 48), np.float32)}, "ffn_gate_inp"),
        ("llama", "mixtral", {"expert_count": 5}, {}, "expert_used_count"),
        ("llama", "mixtral", {**MIXTRAL, "expert_count": 4}, {}, "or not the 4 of the metadata"),
        (
            "llama",
            "mixtral",
            MIXTRAL,
            {"blk.0.ffn_up.2.weight": np.zeros((40, 48), np.float32)},
            r"layers.0.mlp.experts.2.up_proj.weight' twice",
        ),
        (
            "llama",
            "llama",
            MIXTRAL,
            {"blk.0.ffn_up_exps.weight": np.zeros((4, 48), np.float32)},
            r"\[4, 48\].*no experts",
        ),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, arch: str, variant: str, metadata: Metadata, extra: dict[str, np.ndarray], message: str
) -> None:
    reference = tiny_models.build(variant)
    tensors = {**dict(converted(reference, arch)), **extra}
    path = write(tmp_path / "m.gguf", arch, reference, metadata, tensors)
    with pytest.raises(ModelError, match=message):
        GGUFCheckpoint(path)
