"""Draft heads in few launches: their decoder layers by ``fused_layer``, and the products before and after them."""

from __future__ import annotations

from typing import NamedTuple

from slipstream.kernels.tuning.tiles import Weight
from slipstream.models.fused_layer import layer_weights
from slipstream.models.heads.network import HeadPlan


class HeadWeights(NamedTuple):
    """The weights that a head multiplies with."""

    layer: tuple[Weight, ...]  # its first decoder layer
    mix: tuple[Weight, ...]  # before it: ``fc``, where there is one
    logits: Weight


def head_weights(plan: HeadPlan, width: int) -> HeadWeights:
    """``width`` is the size of a number in bytes."""
    config = plan.config
    size, (qkv, *rest) = config.hidden_size, layer_weights(config, width)
    num_features, mixes = 2, True
    if plan.kind == "eagle":
        qkv = qkv._replace(kind="plain")
    elif plan.kind == "eagle3":
        qkv = qkv._replace(kind="plain", in_size=2 * size)
        num_features, mixes = max(1, len(plan.taps)), bool(plan.taps) or plan.target_hidden_size != size
    mix = Weight("plain", size, num_features * plan.target_hidden_size, width)
    return HeadWeights((qkv, *rest), (mix,) if mixes else (), Weight("head", config.vocab_size, size, width))
