"""How many experts of a layer the tokens of a step choose, and what a step then reads.

A router that has collapsed flatters every engine: tokens that all choose the same experts read few weights. So a figure
of a model with experts says how many are touched, beside the number that uniform choice would touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from slipstream.config import ModelConfig
from slipstream.experts_config import Routing
from slipstream.models import experts as experts_module
from slipstream.models.decoder import Decoder
from slipstream.models.experts import ExpertWeights
from slipstream.models.latent_attention import LatentAttention
from slipstream.models.load import Placement, built_under, count_bytes
from slipstream.models.registry import architecture_of
from slipstream.models.shapes import shape_config


def touched_by_uniform_choice(config: ModelConfig, batch: int) -> float:
    """Experts of a layer that so many tokens touch if each chooses its own independently."""
    assert config.experts is not None
    num, chosen = config.experts.num_experts, config.experts.routing.num_chosen
    return num * (1 - (1 - chosen / num) ** batch)


@contextmanager
def watched_choices(batch: int) -> Iterator[list[int]]:
    """The number of different experts in each layer of each step with so many tokens. Reads the device: not timed."""
    found: list[int] = []
    right = experts_module.route_tokens

    def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> Any:
        weights, expert_ids = right(logits, bias, routing)
        if logits.shape[0] == batch:
            found.append(int(expert_ids.unique().numel()))
        return weights, expert_ids

    with patch.object(experts_module, "route_tokens", route):
        yield found


def mean_touched(found: list[int]) -> float:
    return fmean(found) if found else 0.0


def step_bytes(shape: str, dtype: str, num_touched: float) -> int:
    """Bytes of the weights that a decode step reads, if it touches so many experts of each layer that has some."""
    architecture = architecture_of(shape_config(shape))
    config = architecture.read_config(shape_config(shape))
    with built_under(Placement(torch.device("meta"), getattr(torch, dtype))):
        model: Decoder = architecture(config, max_position=1)
        model.finish_weights(torch.device("cuda"))
    total = count_bytes(model)
    if not config.tie_embeddings:  # a table of which a step reads a few rows
        total -= count_bytes(model.model.embed_tokens)
    for module in model.modules():
        if isinstance(module, ExpertWeights):
            total -= int(count_bytes(module) * (1 - num_touched / module.shape.num_experts))
        elif isinstance(module, LatentAttention):
            total -= count_bytes(module.kv_b_proj)  # of prompts; what decodes reads its two halves apart
    return total
