"""An architecture that the package does not know: Llama with layers of three kinds, and the same in plain torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.attention.context import AttentionContext
from slipstream.config import ModelConfig
from slipstream.models.decoder import Decoder, DecoderLayer
from slipstream.models.layers import Layer, Linear
from slipstream.models.llama import Llama
from tests import tiny_models
from tests.drill.toy_caches import DECAY, Differences, RunningSums, SumLayer
from tests.models.heads import plain_heads

NAME = "ToyForCausalLM"
KINDS = ("attention", "differences", "sums")
SIZE = 24  # of a running sum


class RunningSum(Layer):
    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        self.layer = SumLayer(idx)
        self.in_proj = Linear(config.hidden_size, {"in_proj": SIZE})
        self.out_proj = Linear(SIZE, {"out_proj": config.hidden_size})

    def forward(self, x: Tensor, context: AttentionContext, cos_sin: Tensor) -> Tensor:
        out: Tensor = self.out_proj(context.run(self.layer, self.in_proj(x)))
        return out


class ToyLayer(DecoderLayer):
    @classmethod
    def make_mixer(cls, config: ModelConfig, idx: int) -> nn.Module:
        is_sum = isinstance(config.cache_specs[idx], RunningSums)
        return RunningSum(config, idx) if is_sum else super().make_mixer(config, idx)


class Toy(Decoder):
    layer_class = ToyLayer

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        config = Llama.read_config(hf)
        kinds = {
            "attention": config.keys_and_values,
            "differences": Differences(config.num_kv_heads, config.head_dim),
            "sums": RunningSums(SIZE),
        }
        return replace(config, layer_caches=tuple(kinds[name] for name in hf["toy_layers"]))


def write_model(folder: Path, kinds: tuple[str, ...] = KINDS) -> dict[str, Tensor]:
    """A random checkpoint; its tensors, in float64."""
    folder = tiny_models.save(tiny_models.build("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [NAME], "toy_layers": list(kinds)}))
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for idx, kind in enumerate(kinds):
        if kind == "sums":
            prefix = f"model.layers.{idx}.self_attn."
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
            size = config["hidden_size"]
            tensors[f"{prefix}in_proj.weight"] = 0.3 * torch.randn(SIZE, size, generator=generator)
            tensors[f"{prefix}out_proj.weight"] = 0.3 * torch.randn(size, SIZE, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    return {name: tensor.double() for name, tensor in tensors.items()}


class Twin:
    """The same model without any cache: every token from the whole text, in float64."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._shape, self._tensors = plain_heads.Shape.from_config(self._config), tensors

    def logits(self, token_ids: list[int]) -> Tensor:
        tensors, eps = self._tensors, self._shape.eps
        x = tensors["model.embed_tokens.weight"][token_ids]
        for idx, kind in enumerate(self._config["toy_layers"]):
            prefix = f"model.layers.{idx}."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            normed = plain_heads.rms(x, own["input_layernorm.weight"], eps)
            x = x + (_sums(normed, own) if kind == "sums" else plain_heads.attention(normed, own, self._shape))
            normed = plain_heads.rms(x, own["post_attention_layernorm.weight"], eps)
            x = x + plain_heads.feed_forward(normed, own, self._shape)
        return plain_heads.rms(x, tensors["model.norm.weight"], eps) @ tensors["lm_head.weight"].T

    def generate(self, prompt: list[int], count: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(count):
            token_ids.append(int(self.logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]


def _sums(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """All at once: the sum after token t has token s with a weight of DECAY ** (t - s)."""
    ages = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
    matrix = torch.where(ages >= 0, DECAY ** ages.clamp(min=0).double(), 0.0)
    sums = matrix @ plain_heads.project(x, weights, "self_attn.in_proj")
    return plain_heads.project(sums, weights, "self_attn.out_proj")
