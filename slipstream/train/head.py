"""The EAGLE-3 head in training: whole texts at once, with several unrolled draft steps.

At index t of the first step the head takes the target's states at t and the token at t + 1, and predicts the token at
t + 2. In step j it takes its own output at index t of step j - 1 and the token at t + 1 + j, at position t + j, as the
engine does for the j-th draft after t (``models/heads/eagle3.py``, ``speculate/eagle.py``). Parameters have the names
of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.heads.network import HeadPlan
from slipstream.models.rope import cos_sin_table
from slipstream.train.attention import KeyValue, draft_attention
from slipstream.train.hidden_state_cache import to_device
from slipstream.train.loss import soft_cross_entropy, target_distribution
from slipstream.train.trainer import Sample

_STEP_WEIGHT = 0.8  # weight of a draft step, relative to the one before
_CHUNK = 8192  # rows of logits at a time


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        return F.rms_norm(wide, self.weight.shape, self.weight, self.eps)


_Module = TypeVar("_Module", bound=nn.Module)


def widen(head: _Module, dtype: torch.dtype) -> _Module:
    """Parameters in float32 at least, whatever the target has; what is the target's keeps its type."""
    for module in head.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
    return head


class WideAttention(nn.Module):
    """Attention over the concatenation of an embedding and a hidden state."""

    def __init__(self, plan: HeadPlan) -> None:
        super().__init__()
        config = plan.config
        size, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, size, bias=False)

    def forward(self, joined: Tensor, past: list[KeyValue], cos_sin: Tensor) -> Tensor:
        """``past`` has keys and values of the steps before; those of this step are appended."""
        rows, length, _ = joined.shape
        q, k, v = (
            proj(joined).view(rows, length, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        past.append((rotate(k, cos_sin), v))
        mixed: Tensor = self.o_proj(draft_attention(rotate(q, cos_sin), past).flatten(2))
        return mixed


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    def __init__(self, plan: HeadPlan) -> None:
        super().__init__()
        size, eps = plan.config.hidden_size, plan.config.rms_norm_eps
        self.input_layernorm = Norm(size, eps)
        self.hidden_norm = Norm(size, eps)
        self.self_attn = WideAttention(plan)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = FeedForward(size, plan.config.intermediate_size)

    def forward(self, embedded: Tensor, hidden: Tensor, past: list[KeyValue], cos_sin: Tensor) -> Tensor:
        joined = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        residual = hidden + self.self_attn(joined, past, cos_sin)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class TrainableHead(nn.Module):
    measured_every = 1
    embedding: Tensor
    target_ids: Tensor
    cos_sin: Tensor

    def __init__(
        self,
        plan: HeadPlan,
        embedding: Tensor,  # [target_vocab, hidden]: the target's, which is not trained
        target_ids: Tensor,  # [draft_vocab] int64
        max_position: int,
        num_steps: int = 1,  # draft steps unrolled in training
    ) -> None:
        super().__init__()
        self.plan, config = plan, plan.config
        self.num_steps = num_steps
        size = config.hidden_size
        self.fc = nn.Linear(len(plan.taps) * size, size, bias=False)
        self.midlayer = MidLayer(plan)
        self.norm = Norm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.register_buffer("cos_sin", cos_sin_table(config.rope, max_position, embedding.device), persistent=False)

    @torch.no_grad()
    def initialise(self, head: Tensor, norm: Tensor, layer: Mapping[str, Tensor], seed: int) -> None:
        """Initial weights: the last tap passes through the target's last layer, to the target's logits.

        ``head`` and ``norm`` are the target's logits weight and final norm, ``layer`` the weights of its last layer if
        it has the same structure. The rest is small and random.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                small = 0.002 if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")) else 0.02
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, small, generator=generator))
        size = self.plan.config.hidden_size
        self.fc.weight[:, -size:] += torch.eye(size, device=self.fc.weight.device, dtype=self.fc.weight.dtype)
        for name, weight in layer.items():
            own = {"input_layernorm.weight": "hidden_norm.weight"}.get(name, name)
            # Weights over embedding and state take the target's weights for the state.
            self.midlayer.get_parameter(own)[..., -weight.shape[-1] :].copy_(weight)
        self.lm_head.weight.copy_(head[self.target_ids])
        self.norm.weight.copy_(norm)

    def states(self, features: Tensor, token_ids: Tensor, num_steps: int) -> list[Tensor]:
        """The head's output in every step, [rows, length, hidden] each, before the final norm.

        ``features`` [rows, length, taps * hidden] and ``token_ids`` [rows, length] are of the same texts.
        """
        hidden = self._mixed(features)
        past: list[KeyValue] = []
        made = []
        for step in range(num_steps):
            hidden = self.advance(step, _moved(token_ids, 1 + step), hidden, past)
            made.append(hidden)
        return made

    def _mixed(self, features: Tensor) -> Tensor:
        # The residual stream passes through all steps, so it stays in float32; matrix products may be narrower.
        mixed: Tensor = self.fc(features).to(self.norm.weight.dtype)
        return mixed

    def advance(self, step: int, token_ids: Tensor, hidden: Tensor, past: list[KeyValue]) -> Tensor:
        cos_sin = self.cos_sin[step : step + hidden.shape[1]]
        out: Tensor = self.midlayer(F.embedding(token_ids, self.embedding).to(hidden.dtype), hidden, past, cos_sin)
        return out

    def loss(self, sample: Sample) -> Tensor:
        """Cross entropy against the target's distribution, over the draft vocabulary, at every draft step."""
        # On the host, since nonzero on the device would synchronise.
        rows = to_device(sample.batch.trained.flatten().nonzero().flatten(), sample.token_ids.device)
        normed = sample.normed.flatten(0, 1).index_select(0, rows).to(sample.features.dtype)
        target = target_distribution(normed, sample.matrix)
        loss, total = torch.zeros((), device=rows.device), 0.0
        for step, states in enumerate(self.states(sample.features, sample.token_ids, self.num_steps)):
            own = self.norm(states.flatten(0, 1).index_select(0, rows - 1 - step))
            weight = _STEP_WEIGHT**step
            loss, total = loss + weight * soft_cross_entropy(own, self.lm_head.weight, target), total + weight
        return loss / total

    def drafts_at(self, sample: Sample, starts: Tensor, num_drafts: int) -> Tensor:
        """The tokens before each draft are the text's own, so a draft does not depend on the one before."""
        found = torch.empty(num_drafts, len(starts), dtype=torch.int64, device=starts.device)
        for step, states in enumerate(self.states(sample.features, sample.token_ids, num_drafts)):
            picked = states.flatten(0, 1)[starts - 1]
            for begin in range(0, len(starts), _CHUNK):
                part = slice(begin, begin + _CHUNK)
                found[step, part] = self.target_ids[self.lm_head(self.norm(picked[part])).argmax(dim=-1)]
        return found

    @torch.no_grad()
    def drafts(self, features: Tensor, token_ids: Tensor, num_drafts: int) -> Tensor:
        """[rows, length, num_drafts]: the greedy drafts after index t, as ids of the target."""
        hidden = self._mixed(features)
        past: list[KeyValue] = []
        taken, ids = [], _moved(token_ids, 1)
        for step in range(num_drafts):
            hidden = self.advance(step, ids, hidden, past)
            ids = self.target_ids[self.lm_head(self.norm(hidden)).argmax(dim=-1)]
            taken.append(ids)
        return torch.stack(taken, dim=-1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:  # [rows, length, heads, head_dim], [(rows,) length, 2, head_dim / 2]
    cos, sin = cos_sin.unsqueeze(-2).to(torch.promote_types(x.dtype, torch.float32)).unbind(-3)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _moved(token_ids: Tensor, by: int) -> Tensor:
    """The tokens shifted: at index t the one at t + by; 0 past the end."""
    return F.pad(token_ids[:, by:], (0, min(by, token_ids.shape[1])))
