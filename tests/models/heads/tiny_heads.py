"""Tiny random draft heads in the form each publisher gives them, over tiny targets, and a way to load them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.checkpoints.head_checkpoint import open_head_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.heads.draft_head import DraftHead
from slipstream.models.heads.registry import build_head, read_head
from slipstream.models.load import load_weights
from slipstream.models.registry import architecture_of
from tests import tiny_models
from tests.models.heads import plain_heads
from tests.models.heads.plain_heads import PlainDeepSeekMtp, PlainEagle, PlainEagle3, PlainHead, PlainQwenMtp

NUM_LAYERS = 8
HIDDEN, VOCAB, DRAFT_VOCAB = 48, tiny_models.VOCAB_SIZE, 100
TAPS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, Tensor]


# --- targets --------------------------------------------------------------------------------------


@dataclass
class TinyTarget:
    config: dict[str, Any]
    tensors: Tensors
    model: Decoder

    @property
    def plain(self) -> plain_heads.Target:
        embedding = self.tensors["model.embed_tokens.weight"]
        return plain_heads.Target(embedding, self.tensors.get("lm_head.weight", embedding), NUM_LAYERS)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def tiny_target(variant: str = "llama", dtype: torch.dtype = torch.float64) -> TinyTarget:
    reference = tiny_models.build(variant, num_hidden_layers=NUM_LAYERS).to(dtype)
    config = {**reference.config.to_dict(), "architectures": [type(reference).__name__]}
    tensors = {name: tensor.detach() for name, tensor in reference.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    architecture = architecture_of(config)
    with default_dtype(dtype):
        model = architecture(architecture.read_config(config), 64)
    load_weights(model, tensors.items())
    return TinyTarget(config, tensors, model)


# --- heads, as files have them --------------------------------------------------------------------


@dataclass
class Case:
    config: dict[str, Any]
    tensors: Tensors
    plain: type[PlainHead]
    kind: Any = None
    target: str = "llama"
    bin: bool = False

    def write(self, folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.bin:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file(self.tensors, folder / "model.safetensors")
        return folder


BODY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        values = torch.rand(shape, generator=generator, dtype=torch.float64)
        made[name] = values + 0.5 if "norm" in name else (values - 0.5) * (6.0 / shape[-1] ** 0.5)
    return made


def layer_shapes(prefix: str, body: dict[str, Any], in_size: int | None = None) -> dict[str, tuple[int, ...]]:
    """Of a decoder layer without the norm before attention."""
    size, inner, dim = body["hidden_size"], body["intermediate_size"], body["head_dim"]
    q, kv = body["num_attention_heads"] * dim, body["num_key_value_heads"] * dim
    width = in_size or size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (size, q),
        "post_attention_layernorm.weight": (size,),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
    if body.get("attention_bias"):
        shapes |= {f"self_attn.{part}_proj.bias": (n,) for part, n in (("q", q), ("k", kv), ("v", kv), ("o", size))}
    if body["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def vocabulary(seed: int = 2) -> Tensors:
    """d2t and t2d of a draft vocabulary that begins somewhere else than the target's."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": mask}


def eagle3(
    config: dict[str, Any] | None = None,
    body: dict[str, Any] | None = None,
    layer: str = "midlayer.",
    prefix: str = "",
    width: int = 3 * HIDDEN,
    extra: dict[str, tuple[int, ...]] | None = None,
    reduced: bool = True,
    **kwargs: Any,
) -> Case:
    """An EAGLE-3 head; ``config`` is written to the file beside or around the body's."""
    body = {**BODY, **(body or {})}
    size = body["hidden_size"]
    shapes = {"norm.weight": (size,), f"{layer}input_layernorm.weight": (size,), f"{layer}hidden_norm.weight": (size,)}
    shapes |= layer_shapes(layer, body, 2 * size)
    if width:
        shapes["fc.weight"] = (size, width)
    for idx in range(1, body["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{idx}.", body) | {f"layers.{idx}.input_layernorm.weight": (size,)}
    shapes = {prefix + name: shape for name, shape in (shapes | (extra or {})).items()}
    config = dict(config or {})
    if reduced:
        shapes["lm_head.weight"] = (DRAFT_VOCAB, size)
        config = {"draft_vocab_size": DRAFT_VOCAB, **config}
    tensors = random_tensors(shapes) | (vocabulary() if reduced else {})
    if "speculators_model_type" in config:
        whole = {"transformer_layer_config": body, **config}
    else:
        whole = {"architectures": ["LlamaForCausalLMEagle3"], **body, **config}
    return Case(whole, tensors, PlainEagle3, **kwargs)


SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "model_type": "speculators",
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": "someone/target"},
    },
    "target_hidden_size": None,
    "embed_requires_grad": False,
    "tie_word_embeddings": False,
}
OWN_EMBEDDING = {"embed_tokens.weight": (VOCAB, HIDDEN)}


def eagle(config: dict[str, Any] | None = None, prefix: str = "", **kwargs: Any) -> Case:
    body = {**BODY, **(config or {})}
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN), **kwargs.pop("extra", {})}
    shapes |= layer_shapes("layers.0.", body)
    for idx in range(1, body["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{idx}.", body) | {f"layers.{idx}.input_layernorm.weight": (HIDDEN,)}
    tensors = random_tensors({prefix + name: shape for name, shape in shapes.items()})
    return Case({"architectures": ["LlamaForCausalLMEagle"], **body}, tensors, PlainEagle, **kwargs)


def eagle_of_speculators() -> Case:
    plain = eagle(extra={"fc.bias": (HIDDEN,)})
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    tensors = {}
    for name, tensor in plain.tensors.items():
        theirs = next(ours for ours in names if name.startswith(ours))
        tensors[names[theirs] + name.removeprefix(theirs)] = tensor
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "fusion_bias": True,
        "layernorms": False,
        "transformer_layer_config": BODY,
    }
    return Case(config, tensors, PlainEagle)


def target_body(variant: str) -> dict[str, Any]:
    return tiny_target(variant).config


def deepseek(count: int = 1, target: str = "llama", own: bool = False) -> Case:
    body = target_body(target)
    shapes: dict[str, tuple[int, ...]] = {}
    for idx in range(NUM_LAYERS, NUM_LAYERS + count):
        prefix = f"model.layers.{idx}."
        names = ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
        shapes |= layer_shapes(prefix, body) | {f"{prefix}{name}.weight": (HIDDEN,) for name in names}
        shapes[f"{prefix}eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        if body["model_type"] == "mixtral":
            shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
            shapes |= mixtral_shapes(f"{prefix}block_sparse_moe.", body)
    tensors = random_tensors(shapes)
    if own:
        shared = random_tensors({"embed_tokens.weight": (VOCAB, HIDDEN), "shared_head.head.weight": (VOCAB, HIDDEN)})
        for idx in range(NUM_LAYERS, NUM_LAYERS + count):
            tensors |= {f"model.layers.{idx}.{name}": tensor.clone() for name, tensor in shared.items()}
    return Case({**body, "num_nextn_predict_layers": count}, tensors, PlainDeepSeekMtp, target=target)


def mixtral_shapes(prefix: str, body: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    inner, num = body["intermediate_size"], body["num_local_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}gate.weight": (num, HIDDEN)}
    for idx in range(num):
        for name, shape in (("w1", (inner, HIDDEN)), ("w2", (HIDDEN, inner)), ("w3", (inner, HIDDEN))):
            shapes[f"{prefix}experts.{idx}.{name}.weight"] = shape
    return shapes


def qwen_mtp(count: int = 1, target: str = "llama") -> Case:
    body = target_body(target)
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes: dict[str, tuple[int, ...]] = {f"mtp.{name}.weight": (HIDDEN,) for name in names}
    shapes["mtp.fc.weight"] = (HIDDEN, 2 * HIDDEN)
    for idx in range(count):
        prefix = f"mtp.layers.{idx}."
        shapes |= layer_shapes(prefix, body) | {f"{prefix}input_layernorm.weight": (HIDDEN,)}
    config = {**body, "mtp_num_hidden_layers": count}
    return Case(config, random_tensors(shapes), PlainQwenMtp, target=target)


CASES: dict[str, Callable[[], Case]] = {
    "eagle3 of SpecForge": lambda: eagle3({TAPS: [1, NUM_LAYERS // 2 - 1, NUM_LAYERS - 4]}),
    "eagle3 with everything left out": lambda: eagle3(),
    "eagle3 with an embedding, prefixed": lambda: eagle3(
        {TAPS: [2, 4, 5]}, layer="layers.0.", prefix="model.", extra=OWN_EMBEDDING
    ),
    "eagle3 of NVIDIA": lambda: eagle3(
        {
            "eagle_config": {
                TAPS: [1, 3, 4],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": None,
                "norm_before_fc": True,
            }
        },
        extra={"input_norm.weight": (3 * HIDDEN,)},
    ),
    "eagle3 from the last state": lambda: eagle3({"eagle_config": {"use_aux_hidden_state": False}}, width=0),
    "eagle3, residual normed": lambda: eagle3({"norm_before_residual": True}),
    "eagle3, four taps normed each": lambda: eagle3(
        {"fc_norm": True, TAPS: [0, 3, 6, NUM_LAYERS], "num_aux_hidden_states": 4},
        width=4 * HIDDEN,
        extra={f"fc_norm.{i}.weight": (HIDDEN,) for i in range(4)},
    ),
    "eagle3, normed output": lambda: eagle3({"norm_output": True}),
    "eagle3 of its own size, bin": lambda: eagle3(
        {"target_hidden_size": HIDDEN},
        body={"hidden_size": 32},
        extra={"embed_tokens.weight": (VOCAB, 32)},
        bin=True,
    ),
    "eagle3 of its own size, tied": lambda: eagle3(
        {"target_hidden_size": HIDDEN, "tie_word_embeddings": True},
        body={"hidden_size": 32},
        extra={"embed_tokens.weight": (VOCAB, 32)},
        reduced=False,
    ),
    "eagle3 with the target's vocabulary": lambda: eagle3(reduced=False),
    "eagle3 with the target's vocabulary, own matrix": lambda: eagle3(
        {"draft_vocab_size": VOCAB}, extra={"lm_head.weight": (VOCAB, HIDDEN)}, reduced=False
    ),
    "eagle3 of two layers with biases": lambda: eagle3(body={"num_hidden_layers": 2, "attention_bias": True}),
    "eagle3 under its layer's name, bin": lambda: eagle3(
        {"architectures": ["LlamaForCausalLM"]}, kind="eagle3", bin=True
    ),
    "eagle3 of speculators": lambda: eagle3(SPECULATORS, layer="layers.0."),
    "eagle3 of speculators, all flags": lambda: eagle3(
        {
            **SPECULATORS,
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": False,
            "norm_before_fc": True,
            "fc_norm": False,
            "norm_output": True,
            TAPS: [2, 5, 7],
        },
        body={"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 3},
        layer="layers.0.",
        extra={"input_norm.weight": (3 * HIDDEN,), **OWN_EMBEDDING},
    ),
    "eagle": lambda: eagle(),
    "eagle of two layers, prefixed, bin": lambda: eagle(
        {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 2},
        "model.",
        extra={"fc.bias": (HIDDEN,), **OWN_EMBEDDING},
        bin=True,
    ),
    "eagle under its layer's name": lambda: eagle(
        {"architectures": ["LlamaForCausalLM"], "eagle_fc_bias": True}, extra={"fc.bias": (HIDDEN,)}, kind="eagle"
    ),
    "eagle on a tied target": lambda: eagle(target="llama-tied"),
    "eagle of vLLM's first converter": lambda: nested(eagle(extra={"lm_head.weight": (VOCAB, HIDDEN)})),
    "eagle of speculators": eagle_of_speculators,
    "mtp of DeepSeek": lambda: deepseek(),
    "mtp of DeepSeek, three layers with all of their own": lambda: deepseek(3, own=True),
    "mtp of DeepSeek over Qwen3": lambda: deepseek(2, "qwen3"),
    "mtp of DeepSeek over Mixtral": lambda: deepseek(1, "mixtral"),
    "mtp of Qwen3-Next": lambda: qwen_mtp(),
    "mtp of Qwen3-Next, two layers, tied": lambda: qwen_mtp(2, "llama-tied"),
}


def nested(case: Case) -> Case:
    return replace(
        case, config={"model_type": "eagle", "model": {**case.config, "architectures": ["LlamaForCausalLM"]}}
    )


def load(case: Case, folder: Path, dtype: torch.dtype = torch.float64) -> DraftHead:
    target = tiny_target(case.target, dtype)
    checkpoint = open_head_checkpoint(case.write(folder))
    plan = read_head(checkpoint.config, target.model.config, case.kind)
    with default_dtype(dtype):
        head = build_head(plan, target.model, 64)
    load_weights(head, checkpoint.tensors())
    return head
