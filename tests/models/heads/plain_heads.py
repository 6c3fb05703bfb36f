"""Draft heads written a second time, from the formats' description alone: plain torch, whole sequences, no cache.

A plain head reads the dictionary of a ``config.json`` and tensors under the names of a file. It shares nothing with
``slipstream.models``. Every call computes a whole sequence anew with full attention; what was drafted before is part of
the sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Target:
    """What a head may borrow, and where its features come from."""

    embedding: Tensor
    head: Tensor
    num_layers: int


@dataclass
class Shape:
    """Of one decoder layer."""

    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    window: int = 0
    experts_per_token: int = 0

    @classmethod
    def from_config(cls, config: dict[str, Any], window: int = 0) -> Shape:
        rope = config.get("rope_parameters") or {}
        return cls(
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            config["rms_norm_eps"],
            window,
            config.get("num_experts_per_tok", 0),
        )


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """[n, heads, dim] at positions 0, 1, ...: pairs (i, i + dim / 2); angles in single precision, as models have it."""
    n, _, dim = x.shape
    inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.arange(n).float()[:, None, None] * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def project(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def attention(x: Tensor, weights: dict[str, Tensor], shape: Shape) -> Tensor:
    n, group = x.shape[0], shape.heads // shape.kv_heads
    q = project(x, weights, "self_attn.q_proj").view(n, shape.heads, shape.head_dim)
    k = project(x, weights, "self_attn.k_proj").view(n, shape.kv_heads, shape.head_dim)
    v = project(x, weights, "self_attn.v_proj").view(n, shape.kv_heads, shape.head_dim)
    if "self_attn.q_norm.weight" in weights:
        q = rms(q, weights["self_attn.q_norm.weight"], shape.eps)
        k = rms(k, weights["self_attn.k_norm.weight"], shape.eps)
    q, k = rotate(q, shape.theta), rotate(k, shape.theta)
    row, column = torch.arange(n)[:, None], torch.arange(n)[None, :]
    seen = row >= column
    if shape.window:
        seen = seen & (row - column < shape.window)
    out = []
    for head in range(shape.heads):
        scores = q[:, head] @ k[:, head // group].T / shape.head_dim**0.5
        out.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, head // group])
    return project(torch.cat(out, dim=-1), weights, "self_attn.o_proj")


def feed_forward(x: Tensor, weights: dict[str, Tensor], shape: Shape) -> Tensor:
    if "block_sparse_moe.gate.weight" in weights:
        return mixture(x, weights, shape)
    gated = F.silu(project(x, weights, "mlp.gate_proj")) * project(x, weights, "mlp.up_proj")
    return project(gated, weights, "mlp.down_proj")


def mixture(x: Tensor, weights: dict[str, Tensor], shape: Shape) -> Tensor:
    """Mixtral's: a softmax over the best experts of each token."""
    scores = project(x, weights, "block_sparse_moe.gate")
    best, ids = scores.topk(shape.experts_per_token, dim=-1)
    rows = []
    for row, share, chosen in zip(x, best.softmax(-1), ids.tolist(), strict=True):
        parts = []
        for idx in chosen:
            name = f"block_sparse_moe.experts.{idx}"
            gated = F.silu(project(row, weights, f"{name}.w1")) * project(row, weights, f"{name}.w3")
            parts.append(project(gated, weights, f"{name}.w2"))
        rows.append((share[:, None] * torch.stack(parts)).sum(0))
    return torch.stack(rows)


def rest_of_layer(mixed: Tensor, residual: Tensor, weights: dict[str, Tensor], shape: Shape) -> Tensor:
    """Everything after attention."""
    residual = residual + mixed
    return residual + feed_forward(rms(residual, weights["post_attention_layernorm.weight"], shape.eps), weights, shape)


def layer(x: Tensor, weights: dict[str, Tensor], shape: Shape) -> Tensor:
    """A decoder layer as the targets have it."""
    normed = rms(x, weights["input_layernorm.weight"], shape.eps)
    return rest_of_layer(attention(normed, weights, shape), x, weights, shape)


def target_states(ids: Tensor, tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """A dense target's states after 0, 1, ... layers, and the one after its final norm."""
    after = [tensors["model.embed_tokens.weight"][ids.long()]]
    for idx in range(config["num_hidden_layers"]):
        after.append(layer(after[-1], under(tensors, f"model.layers.{idx}."), Shape.from_config(config)))
    return after, rms(after[-1], tensors["model.norm.weight"], config["rms_norm_eps"])


def under(tensors: dict[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    """The tensors below a name, under what is left of theirs."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        for prefix in prefixes
        if name.startswith(prefix)
    }


@dataclass
class PlainHead(ABC):
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: Target
    _named: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._named = {name.removeprefix("model."): tensor for name, tensor in self.tensors.items()}

    def embed(self, ids: Tensor) -> Tensor:
        return self._named.get("embed_tokens.weight", self.target.embedding)[ids.long()]

    def features(self, after: list[Tensor], final: Tensor) -> Tensor:
        """From the target's states after 0, 1, ... layers, and the one after its final norm."""
        return final

    def combine(self, features: Tensor) -> Tensor:
        return features

    @abstractmethod
    def forward(self, step: int, ids: Tensor, hidden: Tensor) -> Tensor:
        """One whole sequence from its first position on."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._named.get("lm_head.weight", self.target.head).T

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self._named["d2t"][draft_id]) if "d2t" in self._named else draft_id


class PlainEagle(PlainHead):
    def forward(self, step: int, ids: Tensor, hidden: Tensor) -> Tensor:
        config = self.config.get("transformer_layer_config") or self.config.get("model") or self.config
        shape = Shape.from_config(config)
        fc = under(self._named, "fc.", "fusion_fc.")
        x = F.linear(torch.cat([self.embed(ids), hidden], dim=-1), fc["weight"], fc.get("bias"))
        first = under(self._named, "layers.0.", "transformer.")
        x = rest_of_layer(attention(x, first, shape), x, first, shape)
        for idx in range(1, config["num_hidden_layers"]):
            x = layer(x, under(self._named, f"layers.{idx}."), shape)
        return x


class PlainEagle3(PlainHead):
    def _flag(self, key: str, default: bool = False) -> bool:
        value = {**self.config.get("eagle_config", {}), **self.config}.get(key)
        return default if value is None else bool(value)

    def features(self, after: list[Tensor], final: Tensor) -> Tensor:
        if not self._flag("use_aux_hidden_state", True):
            return final
        num_layers = self.target.num_layers
        key = "eagle_aux_hidden_state_layer_ids"
        ids = self.config.get(key) or self.config.get("eagle_config", {}).get(key)
        if ids is None:
            return torch.cat([after[2], after[num_layers // 2], after[num_layers - 3]], dim=-1)
        if ids[0] == 1:
            outputs = after[1:]  # of layer 0, of layer 1, ...
            return torch.cat([outputs[i] for i in ids], dim=-1)
        return torch.cat([after[i] for i in ids], dim=-1)

    @property
    def _layer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.config.get("transformer_layer_config", self.config)
        return config

    def combine(self, features: Tensor) -> Tensor:
        eps = self._layer_config["rms_norm_eps"]
        if self._flag("norm_before_fc"):
            features = rms(features, self._named["input_norm.weight"], eps)
        if self._flag("fc_norm"):
            weights = [w for name, w in sorted(self._named.items()) if name.startswith("fc_norm.")]
            size = features.shape[1] // len(weights)
            features = torch.cat([rms(x, w, eps) for x, w in zip(features.split(size, 1), weights, strict=True)], 1)
        return features @ self._named["fc.weight"].T if "fc.weight" in self._named else features

    def forward(self, step: int, ids: Tensor, hidden: Tensor) -> Tensor:
        config = self._layer_config
        sliding = "sliding_attention" in config.get("layer_types", [])
        shape = Shape.from_config(config, config["sliding_window"] if sliding else 0)
        first = under(self._named, "layers.0.", "midlayer.")
        normed = rms(hidden, first["hidden_norm.weight"], shape.eps)
        is_speculators = "speculators_model_type" in self.config
        residual = normed if self._flag("norm_before_residual", is_speculators) else hidden
        joined = torch.cat([rms(self.embed(ids), first["input_layernorm.weight"], shape.eps), normed], dim=-1)
        x = rest_of_layer(attention(joined, first, shape), residual, first, shape)
        for idx in range(1, config["num_hidden_layers"]):
            x = layer(x, under(self._named, f"layers.{idx}."), shape)
        return rms(x, self._named["norm.weight"], shape.eps) if self._flag("norm_output") else x

    def logits(self, hidden: Tensor) -> Tensor:
        if not self._flag("norm_output"):
            hidden = rms(hidden, self._named["norm.weight"], self._layer_config["rms_norm_eps"])
        if self.config.get("tie_word_embeddings") and "lm_head.weight" not in self._named:
            return hidden @ self._named["embed_tokens.weight"].T
        return super().logits(hidden)


class PlainDeepSeekMtp(PlainHead):
    def forward(self, step: int, ids: Tensor, hidden: Tensor) -> Tensor:
        shape = Shape.from_config(self.config)
        idx = self.target.num_layers + step % self.config["num_nextn_predict_layers"]
        weights = under(self.tensors, f"model.layers.{idx}.")
        embedded = weights.get("embed_tokens.weight", self.target.embedding)[ids.long()].clone()
        embedded[0] = 0.0
        parts = [rms(embedded, weights["enorm.weight"], shape.eps), rms(hidden, weights["hnorm.weight"], shape.eps)]
        x = layer(torch.cat(parts, dim=-1) @ weights["eh_proj.weight"].T, weights, shape)
        return rms(x, weights["shared_head.norm.weight"], shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        own = under(self.tensors, f"model.layers.{self.target.num_layers}.").get("shared_head.head.weight")
        return hidden @ (self.target.head if own is None else own).T


class PlainQwenMtp(PlainHead):
    def forward(self, step: int, ids: Tensor, hidden: Tensor) -> Tensor:
        shape, w = Shape.from_config(self.config), under(self.tensors, "mtp.")
        parts = [
            rms(self.target.embedding[ids.long()], w["pre_fc_norm_embedding.weight"], shape.eps),
            rms(hidden, w["pre_fc_norm_hidden.weight"], shape.eps),
        ]
        idx = step % self.config["mtp_num_hidden_layers"]
        x = layer(torch.cat(parts, dim=-1) @ w["fc.weight"].T, under(w, f"layers.{idx}."), shape)
        return rms(x, w["norm.weight"], shape.eps)
