"""The DFlash head in training: many blocks of each text at once.

A block begins with a token of the text, its anchor, and has masks for the tokens after it. It sees the target's states
of the tokens before the anchor, and itself, as when it drafts (``models/heads/dflash.py``, ``speculate/dflash.py``).
Anchors are drawn anew in every step. Parameters have the names of the file.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.config import ModelConfig
from slipstream.models.heads.network import HeadPlan
from slipstream.models.rope import cos_sin_table
from slipstream.train.head import FeedForward, Norm, rotate
from slipstream.train.hidden_state_cache import to_device
from slipstream.train.loss import soft_cross_entropy, target_distribution
from slipstream.train.trainer import Sample

_WEIGHT_SPAN = 7 / 16  # of a block: places in which the weight of a draft falls by a factor of e
_AT_ONCE = 512  # blocks of a row that are measured in one pass


class BlockAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, size, bias=False)
        self.q_norm, self.k_norm = (Norm(config.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(
        self,
        x: Tensor,  # [rows, tokens of all blocks, size], normed
        context: Tensor,  # [rows, length, size]
        sees: Tensor,  # [rows, 1, tokens of all blocks, length + tokens of all blocks] bool
        turns: tuple[Tensor, Tensor],  # cosines and sines of the context, and of the blocks
    ) -> Tensor:
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), turns[1])
        parts = zip((context, x), turns, strict=True)
        keys = [rotate(self.k_norm(self._heads(self.k_proj(part))), turn) for part, turn in parts]
        values = torch.cat([self._heads(self.v_proj(part)) for part in (context, x)], dim=1)
        k, v = (part.repeat_interleave(self.group, dim=2).transpose(1, 2) for part in (torch.cat(keys, dim=1), values))
        q = q.transpose(1, 2).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k.to(v.dtype), v, attn_mask=sees)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)


class BlockLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)
        self.self_attn = BlockAttention(config)
        self.mlp = FeedForward(size, config.intermediate_size)

    def forward(self, x: Tensor, context: Tensor, sees: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, sees, turns)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TrainableBlockHead(nn.Module):
    measured_every = 4
    embedding: Tensor
    target_ids: Tensor
    cos_sin: Tensor

    def __init__(
        self,
        plan: HeadPlan,
        embedding: Tensor,  # [target_vocab, hidden]: the target's, which is not trained
        max_position: int,
        num_anchors: int,  # blocks of each text in a step
    ) -> None:
        super().__init__()
        assert plan.block is not None
        self.plan, self.block, self.num_anchors = plan, plan.block, num_anchors
        config, size = plan.config, plan.config.hidden_size
        self.fc = nn.Linear(len(plan.taps) * size, size, bias=False)
        self.hidden_norm, self.norm = Norm(size, config.rms_norm_eps), Norm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_ids", torch.arange(config.vocab_size), persistent=False)
        self.register_buffer("cos_sin", cos_sin_table(config.rope, max_position, embedding.device), persistent=False)

    @torch.no_grad()
    def initialise(self, norm: Tensor, seed: int) -> None:
        """Random, of a size that keeps the scale of states; layers add little at first. The last norm is given."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 1 / math.sqrt(parameter.shape[1])
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    scale /= math.sqrt(2 * len(self.layers))
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, scale, generator=generator))
        self.norm.weight.copy_(norm)

    def states(self, sample: Sample, anchors: Tensor) -> Tensor:
        """[rows, anchors, block, hidden] after the final norm, of blocks that begin at these places of each row."""
        rows, num_anchors = anchors.shape
        size, length = self.block.size, sample.token_ids.shape[1]
        ids = torch.full((rows, num_anchors, size), self.block.mask_id, device=anchors.device)
        ids[..., 0] = sample.token_ids.gather(1, anchors)
        places = (anchors.unsqueeze(-1) + torch.arange(size, device=anchors.device)).flatten(1)
        context = self.hidden_norm(self.fc(sample.features)).to(sample.features.dtype)
        x = F.embedding(ids.flatten(1), self.embedding).to(self.norm.weight.dtype)
        turns = (self.cos_sin[:length], self.cos_sin[places.clamp(max=len(self.cos_sin) - 1)])
        sees = self._sees(anchors, length)
        for layer in self.layers:
            x = layer(x, context, sees, turns)
        normed: Tensor = self.norm(x)
        return normed.view(rows, num_anchors, size, -1)

    def _sees(self, anchors: Tensor, length: int) -> Tensor:
        """[rows, 1, tokens, length + tokens]: what is before a block's anchor, and the block itself."""
        rows, num_anchors = anchors.shape
        size, on = self.block.size, anchors.device
        before = torch.arange(length, device=on) < anchors.unsqueeze(-1)
        before = before.repeat_interleave(size, dim=1)
        owner = torch.arange(num_anchors, device=on).repeat_interleave(size)
        own = (owner.unsqueeze(1) == owner).expand(rows, -1, -1)
        return torch.cat([before, own], dim=-1).unsqueeze(1)

    def _draw_anchors(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Places in each row whose next token is trained, [rows, anchors]; which of them are there. On the host."""
        generator = torch.Generator().manual_seed(sample.seed)
        trained = sample.batch.trained
        count = min(self.num_anchors, int(trained.sum(dim=1).max()))
        chosen = (torch.rand(trained.shape, generator=generator) + trained).topk(max(1, count), dim=1).indices
        return chosen, trained.gather(1, chosen)

    def loss(self, sample: Sample) -> Tensor:
        """Cross entropy against the target's distribution; places far from the anchor weigh less."""
        anchors, exist = self._draw_anchors(sample)
        on, length = sample.token_ids.device, sample.token_ids.shape[1]
        states = self.states(sample, to_device(anchors, on))
        trained = sample.batch.trained.flatten()
        rows = torch.arange(len(anchors)).unsqueeze(1) * length
        loss, total = torch.zeros((), device=on), 0.0
        for place in range(1, self.block.size):
            # The target's state before the token at this place; a block ends with its text.
            before = anchors + place - 1
            there = exist & (before < length)
            flat = rows + before.clamp(max=length - 1)
            there &= trained[flat]
            if not bool(there.any()):
                continue
            picked = there.flatten().nonzero().flatten()
            source, blocks = to_device(flat.flatten()[picked], on), to_device(picked, on)
            normed = sample.normed.flatten(0, 1).index_select(0, source).to(sample.features.dtype)
            own = states[:, :, place].flatten(0, 1).index_select(0, blocks)
            weight = math.exp(-(place - 1) / (_WEIGHT_SPAN * self.block.size)) * len(picked)
            target = target_distribution(normed, sample.matrix)
            loss, total = loss + weight * soft_cross_entropy(own, sample.matrix, target), total + weight
        return loss / max(total, 1.0)

    def drafts_at(self, sample: Sample, starts: Tensor, num_drafts: int) -> Tensor:
        length, found = sample.token_ids.shape[1], []
        for row in range(len(sample.token_ids)):
            own = starts[(starts >= row * length) & (starts < (row + 1) * length)] - row * length
            one = sample._replace(token_ids=sample.token_ids[row : row + 1], features=sample.features[row : row + 1])
            for anchors in torch.split(own, _AT_ONCE):
                states = self.states(one, anchors.unsqueeze(0))[0, :, 1 : 1 + num_drafts]
                found.append((states.to(sample.matrix.dtype) @ sample.matrix.T).argmax(dim=-1))
        return torch.cat(found).T if found else starts.new_empty(num_drafts, 0)
