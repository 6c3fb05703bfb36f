"""Is the acceptance of EAGLE-3 drafts what it should be? The engine's checks beside a plain implementation's drafts.

The engine answers the questions of Spec-Bench greedily and notes every check: how long the text was, how many drafts
were accepted. Then a plain float32 implementation of the target and of multi-step drafting, written from the format's
description, drafts at the same places of the same texts. Both are compared place by place.

    python benchmarks/eagle3_replay.py --questions question.jsonl --folder replay [--k 4] [--max-tokens 256]

Answers and drafts are kept in the folder, a file for each group of questions: a run that was stopped goes on. On a
GPU, `--device cuda --dtype bfloat16` replays what a server computes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from spec_bench_questions import read_questions

_GROUP = 16  # questions whose answers are one file
_LONGEST = 600  # tokens of a prompt; longer ones are left out


class Check(NamedTuple):
    length: int  # tokens of the text before the step
    num_drafts: int
    num_accepted: int


@dataclass
class Answer:
    """A text, and every check in it."""

    token_ids: list[int]
    checks: list[Check] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)  # of each check, by the plain implementation


# --- the engine ---------------------------------------------------------------------------------------


def answer(engine: Engine, prompts: list[list[int]], max_tokens: int, stop_ids: tuple[int, ...]) -> list[Answer]:
    core, answers = engine.core, [Answer(list(prompt)) for prompt in prompts]
    params = SamplingParams(temperature=0.0, seed=0).with_defaults(SamplingParams())
    for i, prompt in enumerate(prompts):
        core.add(Request(str(i), tuple(prompt), params, stop_ids, len(prompt) + max_tokens))
    while core.has_work:
        for update in core.step():
            own = answers[int(update.request_id)]
            if update.num_drafts:
                own.checks.append(Check(len(own.token_ids), update.num_drafts, update.num_accepted))
            own.token_ids += update.token_ids
    return answers


def read_answers(path: Path) -> list[Answer]:
    return [
        Answer(own["token_ids"], [Check(*check) for check in own["checks"]]) for own in json.loads(path.read_text())
    ]


def write_answers(path: Path, answers: list[Answer]) -> None:
    half = path.with_suffix(".half")
    half.write_text(json.dumps([vars(own) for own in answers]))
    half.replace(path)


# --- the plain implementation ---------------------------------------------------------------------------


Weights = dict[str, Tensor]


def below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


class Layer:
    """A Llama layer: its parts, for whole texts."""

    def __init__(self, weights: Weights, config: dict[str, Any]) -> None:
        self._weights, self._eps = weights, config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self._theta = config["rope_theta"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self._weights[f"{name}.weight"], self._eps)

    def heads_of(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [heads, n, dim]; keys repeated for each query head that shares them."""
        q, k, v = (F.linear(x, self._weights[f"self_attn.{name}_proj.weight"]) for name in "qkv")
        q, k, v = (part.view(len(x), -1, self.dim).transpose(0, 1) for part in (q, k, v))
        group = self.heads // self.kv_heads
        turned = (rotate(part, positions, self._theta) for part in (q, k.repeat_interleave(group, 0)))
        return *turned, v.repeat_interleave(group, 0)  # type: ignore[return-value]

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """[heads, n, dim] of attention, through the rest of the layer."""
        out = mixed.transpose(0, 1).flatten(1)
        residual = residual + F.linear(out, self._weights["self_attn.o_proj.weight"])
        x = self.norm(residual, "post_attention_layernorm")
        gate, up = (F.linear(x, self._weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return residual + F.linear(F.silu(gate) * up, self._weights["mlp.down_proj.weight"])


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** -(torch.arange(half, device=x.device) / half)
    low, high = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Plain:
    """The target, and the head's drafts at every place of a text at once."""

    def __init__(self, model: str, head: str, device: str) -> None:
        folder = resolve_model(head, is_head=True)
        checkpoint, self._config = (
            open_checkpoint(resolve_model(model)),
            json.loads((folder / "config.json").read_text()),
        )
        target = {name: tensor.float().to(device) for name, tensor in checkpoint.tensors()}
        own = {name: tensor.to(device) for name, tensor in load_file(folder / "model.safetensors").items()}
        self._head = {name: tensor.float() for name, tensor in own.items() if tensor.is_floating_point()}
        self._ids = own["d2t"] + torch.arange(len(own["d2t"]), device=device)
        self._embedding, shape = target["model.embed_tokens.weight"], checkpoint.config
        layers = range(shape["num_hidden_layers"])
        self._layers = [Layer(below(target, f"model.layers.{idx}."), shape) for idx in layers]
        self._mid = Layer(below(self._head, "midlayer."), self._config)
        self._taps = self._config["eagle_aux_hidden_state_layer_ids"]

    def features(self, ids: Tensor) -> Tensor:
        """The residual stream after the tapped layers, side by side."""
        x, positions, taps = self._embedding[ids], torch.arange(len(ids), device=ids.device), {}
        for idx, layer in enumerate(self._layers):
            taps[idx] = x
            q, k, v = layer.heads_of(layer.norm(x, "input_layernorm"), positions)
            x = layer.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True), x)
        return torch.cat([taps[idx] for idx in self._taps], dim=-1)

    @torch.no_grad()
    def drafts(self, token_ids: list[int], k: int) -> Tensor:
        """[n - 1, k]: what is drafted after the token at index p + 1, for every p."""
        ids, mid = torch.tensor(token_ids, device=self._embedding.device), self._mid
        hidden = F.linear(self.features(ids)[:-1], self._head["fc.weight"])
        n = len(hidden)
        place, next_ids = torch.arange(n, device=ids.device), ids[1:]
        first: tuple[Tensor, Tensor] | None = None
        later: list[tuple[Tensor, Tensor]] = []
        found = []
        hides = torch.ones(n, n, dtype=torch.bool, device=ids.device).triu(1)
        for step in range(k):
            parts = mid.norm(self._embedding[next_ids], "input_layernorm"), mid.norm(hidden, "hidden_norm")
            q, key, value = mid.heads_of(torch.cat(parts, dim=-1), place + step)
            if first is None:
                first = key, value
            else:
                later.append((key, value))
            scores = [(q @ first[0].transpose(1, 2)).masked_fill(hides, -torch.inf)]
            scores += [(q * own).sum(-1, keepdim=True) for own, _ in later]
            weights = (torch.cat(scores, dim=-1) * mid.dim**-0.5).softmax(-1)
            mixed = weights[..., :n] @ first[1]
            for idx, (_, own) in enumerate(later):
                mixed = mixed + weights[..., n + idx, None] * own
            hidden = mid.finish(mixed, hidden)
            normed = rms(hidden, self._head["norm.weight"], self._config["rms_norm_eps"])
            next_ids = self._ids[F.linear(normed, self._head["lm_head.weight"]).argmax(-1)]
            found.append(next_ids)
        return torch.stack(found, dim=1)


# --- beside each other ----------------------------------------------------------------------------------


@dataclass
class Places:
    """By place of a draft: how often the one before was accepted, and how often this one was, too."""

    tried: list[int]
    accepted: list[int]

    @classmethod
    def none(cls, k: int) -> Places:
        return cls([0] * k, [0] * k)

    def count(self, num_accepted: int, most: int) -> None:
        for place in range(min(most, num_accepted + 1)):
            self.tried[place] += 1
            self.accepted[place] += place < num_accepted

    @property
    def shares(self) -> list[float]:
        return [round(a / max(1, t), 4) for a, t in zip(self.accepted, self.tried, strict=True)]


@dataclass
class Comparison:
    k: int
    engine: Places
    plain: Places
    # As other engines count: every check has k places, and what a text's end cut off was rejected.
    engine_uncut: Places
    num_checks: int = 0
    num_equal: int = 0

    @classmethod
    def none(cls, k: int) -> Comparison:
        return cls(k, Places.none(k), Places.none(k), Places.none(k))

    def take(self, own: Answer) -> None:
        for check, drafts in zip(own.checks, own.drafts, strict=True):
            following = own.token_ids[check.length : check.length + self.k]
            most = min(check.num_drafts, len(following))  # places beyond a text's end have no answer
            right = next((i for i in range(most) if drafts[i] != following[i]), most)
            self.engine.count(check.num_accepted, most)
            self.plain.count(right, most)
            self.engine_uncut.count(check.num_accepted, self.k)
            self.num_checks += 1
            self.num_equal += right == min(check.num_accepted, most)


def groups(arguments: argparse.Namespace) -> Iterator[tuple[Path, list[str]]]:
    kinds = read_questions(arguments.questions, arguments.limit)
    asked = [question.turns[0] for own in kinds.values() for question in own]
    for first in range(0, len(asked), _GROUP):
        yield arguments.folder / f"answers-{first:04d}.json", asked[first : first + _GROUP]


def open_engine(arguments: argparse.Namespace) -> Engine:
    options = {
        "model": arguments.model,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "weight_format": "float",
        "max_num_seqs": _GROUP,
        "max_model_len": 4096,
        "speculative_config": {
            "method": "eagle3",
            "model": arguments.head,
            "num_speculative_tokens": arguments.k,
        },
    }
    return build_engine(EngineOptions.from_dict(options))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--folder", type=Path, required=True, help="for answers and result")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", default="slipstream/assets/smollm2-135m-eagle3")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, help="questions of each kind")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    plain: Plain | None = None
    comparison = Comparison.none(arguments.k)
    engine: Engine | None = None
    for path, asked in groups(arguments):
        if not path.exists():
            engine = engine or open_engine(arguments)
            assert engine.tokenizer is not None
            prompts = [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
            prompts = [prompt for prompt in prompts if len(prompt) <= _LONGEST]
            write_answers(path, answer(engine, prompts, arguments.max_tokens, tuple(engine.eos_token_ids)))
        answers = read_answers(path)
        if any(own.checks and not own.drafts for own in answers):
            plain = plain or Plain(arguments.model, arguments.head, arguments.device)
            for own in answers:
                drafts = plain.drafts(own.token_ids, arguments.k)
                own.drafts = [drafts[check.length - 2].tolist() for check in own.checks]
            write_answers(path, answers)
        for own in answers:
            comparison.take(own)
        print(comparison.num_checks, comparison.engine.shares, comparison.plain.shares, flush=True)
    result = {
        "checks": comparison.num_checks,
        "equal": comparison.num_equal,
        "conditional acceptance, engine": comparison.engine.shares,
        "conditional acceptance, plain": comparison.plain.shares,
        "conditional acceptance, engine, ends counted as rejections": comparison.engine_uncut.shares,
    }
    (arguments.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
