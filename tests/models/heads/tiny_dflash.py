"""Tiny random DFlash heads in both published layouts, and what one drafts, written from the formats' description.

``PlainBlock`` computes a whole text anew: features of all tokens but the newest, their keys and values, one pass over
the block. Nothing is cached, so nothing of rejected drafts can be left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.heads import plain_heads
from tests.models.heads.plain_heads import Shape, project, rest_of_layer, rms, under
from tests.models.heads.tiny_heads import (
    BODY,
    DRAFT_VOCAB,
    HIDDEN,
    NUM_LAYERS,
    OWN_EMBEDDING,
    Tensors,
    layer_shapes,
    random_tensors,
    vocabulary,
)

MASK = 260
LONG = {**BODY, "model_type": "qwen3", "max_position_embeddings": 512, "num_hidden_layers": 2, "attention_bias": False}
Files = tuple[dict[str, Any], Tensors]


def shapes_of(body: dict[str, Any], num_taps: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, num_taps * HIDDEN)}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for idx in range(body["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{idx}.", body) | {f"layers.{idx}.input_layernorm.weight": (HIDDEN,)}
    return shapes


def of_zlab(taps: list[int] | None = None, body: dict[str, Any] | None = None, **config: Any) -> Files:
    """Without embedding and head; settings of its own in ``dflash_config``."""
    body = {**LONG, **(body or {})}
    own: dict[str, Any] = {"mask_token_id": MASK, "block_size": 16, **config.pop("dflash_config", {})}
    if taps is not None:
        own["target_layer_ids"] = taps
    whole = {"architectures": ["DFlashDraftModel"], **body, "num_target_layers": NUM_LAYERS, "dflash_config": own}
    num_taps = body["num_hidden_layers"] if taps is None else len(taps)
    return {**whole, **config}, random_tensors(shapes_of(body, num_taps))


def of_speculators(body: dict[str, Any] | None = None, own_embedding: bool = True, **config: Any) -> Files:
    """With a reduced vocabulary and an output matrix of its own."""
    body = {**LONG, **(body or {})}
    taps = config.get("aux_hidden_state_layer_ids", [2, NUM_LAYERS // 2, NUM_LAYERS - 3])
    whole = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}]},
        "transformer_layer_config": body,
        "draft_vocab_size": DRAFT_VOCAB,
        "mask_token_id": MASK,
        "target_hidden_size": HIDDEN,
        **config,
    }
    shapes = shapes_of(body, len(taps)) | {"lm_head.weight": (DRAFT_VOCAB, HIDDEN)}
    return whole, random_tensors(shapes | (OWN_EMBEDDING if own_embedding else {})) | vocabulary()


def renamed(files: Files, names: dict[str, str]) -> Files:
    config, tensors = files
    made = {}
    for name, tensor in tensors.items():
        theirs = next((ours for ours in names if name.startswith(ours)), "")
        made[names.get(theirs, "") + name.removeprefix(theirs)] = tensor
    return config, made


WINDOWED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
CASES: dict[str, Callable[[], Files]] = {
    "z-lab": lambda: of_zlab([1, 3, 4]),
    "z-lab, older": lambda: older(of_zlab(body={"num_hidden_layers": 3})),
    "z-lab, one layer, every tap": lambda: of_zlab([-1, 0, NUM_LAYERS - 1], {"num_hidden_layers": 1}),
    "z-lab, taps out of order, biases": lambda: of_zlab([5, 0], {"attention_bias": True}),
    "z-lab, windows": lambda: of_zlab([2, 4], WINDOWED),
    "z-lab, causal": lambda: of_zlab([2, 4], dflash_config={"causal": True}),
    "z-lab, other names": lambda: renamed(
        of_zlab([2], {"num_hidden_layers": 1}),
        {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc.", "layers.0.": "midlayer."},
    ),
    "z-lab, scales": lambda: of_zlab(
        [2, 4], input_embedding_scale=3.0, output_multiplier=0.5, final_logit_softcapping=2.0
    ),
    "speculators": lambda: of_speculators(),
    "speculators, llama, full": lambda: of_speculators(
        {"model_type": "llama"}, own_embedding=False, aux_hidden_state_layer_ids=[1, 6], block_size=16
    ),
    "speculators, windows": lambda: of_speculators(WINDOWED),
    "speculators, from the anchor": lambda: of_speculators(sample_from_anchor=True),
}


def older(files: Files) -> Files:
    """The block's size at the top level."""
    config, tensors = files
    own = {key: value for key, value in config["dflash_config"].items() if key != "block_size"}
    return {**config, "block_size": 8, "dflash_config": own}, tensors


class PlainBlock:
    def __init__(self, config: dict[str, Any], tensors: Tensors, target: plain_heads.Target) -> None:
        names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "midlayer.": "layers.0."}
        self._named = renamed((config, tensors), names)[1]
        self._config, self._own = config, config.get("dflash_config", {})
        self._body = config.get("transformer_layer_config", config)
        self._target = target
        self._is_speculators = "speculators_model_type" in config
        self.block_size = self._own.get("block_size") or config.get("block_size") or (8 if self._is_speculators else 16)
        self.anchored = bool(config.get("sample_from_anchor"))

    def features(self, after: list[Tensor], final: Tensor) -> Tensor:
        count, own = self._target.num_layers, self._body["num_hidden_layers"]
        if self._is_speculators:
            ids = self._config.get("aux_hidden_state_layer_ids", [2, count // 2, count - 3])
            return torch.cat([after[i] for i in ids], dim=-1)
        ids = self._own.get("target_layer_ids")
        if ids is None:
            ids = [round(1 + i * (count - 4) / (own - 1)) for i in range(own)]
        states = [*after[:-1], final]  # as transformers lists them: the last one is after the final norm
        return torch.cat([states[i + 1] for i in ids], dim=-1)

    def propose(self, text: list[int], features: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Drafts after the text, and their logits; ``features`` are those of all its tokens but the newest."""
        mask = self._config.get("mask_token_id", self._own.get("mask_token_id"))
        eps = self._body["rms_norm_eps"]
        context = rms(features @ self._named["fc.weight"].T, self._named["hidden_norm.weight"], eps)
        table = self._named.get("embed_tokens.weight", self._target.embedding)
        length = count if self.anchored else 1 + count
        x = table[[text[-1], *[mask] * (length - 1)]] * self._config.get("input_embedding_scale", 1.0)
        for idx in range(self._body["num_hidden_layers"]):
            weights = under(self._named, f"layers.{idx}.")
            shape = Shape.from_config(self._body)
            mixed = self._attend(idx, context, rms(x, weights["input_layernorm.weight"], eps), weights, shape)
            x = rest_of_layer(mixed, x, weights, shape)
        x = rms(x, self._named["norm.weight"], eps)
        logits = x[length - count :] @ self._named.get("lm_head.weight", self._target.head).T
        logits = logits * self._config.get("output_multiplier", 1.0)
        if cap := self._config.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        ids = logits.argmax(-1)
        return (ids + self._named["d2t"][ids] if "d2t" in self._named else ids).tolist(), logits

    def _attend(self, idx: int, context: Tensor, x: Tensor, weights: Tensors, shape: Shape) -> Tensor:
        both = torch.cat([context, x])
        n, m = len(both), len(x)
        q = project(x, weights, "self_attn.q_proj").view(m, shape.heads, shape.head_dim)
        k = project(both, weights, "self_attn.k_proj").view(n, shape.kv_heads, shape.head_dim)
        v = project(both, weights, "self_attn.v_proj").view(n, shape.kv_heads, shape.head_dim)
        if "self_attn.q_norm.weight" in weights:
            q, k = (rms(t, weights[f"self_attn.{name}_norm.weight"], shape.eps) for t, name in ((q, "q"), (k, "k")))
        k = plain_heads.rotate(k, shape.theta)
        q = plain_heads.rotate(torch.cat([q.new_zeros(n - m, *q.shape[1:]), q]), shape.theta)[n - m :]
        row, column = torch.arange(n - m, n)[:, None], torch.arange(n)[None, :]
        slides = self._body.get("layer_types", [""] * 9)[idx] == "sliding_attention"
        causal = self._own.get("causal", slides)
        seen = (row >= column) if causal else torch.ones(m, n, dtype=torch.bool)
        if slides:
            seen = seen & (row - column < self._body["sliding_window"])
        group, out = shape.heads // shape.kv_heads, []
        for head in range(shape.heads):
            scores = q[:, head] @ k[:, head // group].T / shape.head_dim**0.5
            out.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, head // group])
        return F.linear(
            torch.cat(out, dim=-1), weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias")
        )
