"""A gated delta net in place of attention: input projection, convolution, delta rule, output projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slipstream.attention.context import AttentionContext
from slipstream.attention.gdn import DeltaInputs, DeltaNetSpec, GDNLayer, GDNStep
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.kernels.recurrent.gated_norm import gated_norm
from slipstream.models.layers import Layer, Linear, RMSNorm
from slipstream.weights.matrix import Slot


class GatedDeltaNet(Layer):
    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        net = config.cache_specs[idx]
        assert isinstance(net, DeltaNetSpec)
        self.idx, self.heads = idx, (net.num_v_heads, net.v_dim)
        size = net.num_v_heads * net.v_dim
        # One projection computes all inputs of a token: what is convolved, the output gate, and the gates of the state.
        parts = {
            "in_proj_qkv": net.num_channels,
            "in_proj_z": size,
            "in_proj_b": net.num_v_heads,
            "in_proj_a": net.num_v_heads,
        }
        self.sizes = list(parts.values())
        self.in_proj = Linear(config.hidden_size, parts)
        self.conv_weight = nn.Parameter(torch.empty(net.num_channels, net.conv_width), requires_grad=False)
        # These are exponents: rounded to 16 bits they would change the decay rate.
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.a_log = nn.Parameter(torch.empty(net.num_v_heads, dtype=wide), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(net.num_v_heads, dtype=wide), requires_grad=False)
        self.norm = RMSNorm(net.v_dim, config.rms_norm_eps)
        self.out_proj = Linear(size, {"out_proj": config.hidden_size})

    def forward(self, x: Tensor, context: AttentionContext, cos_sin: Tensor) -> Tensor:
        layer = GDNLayer(self.idx, self.conv_weight, self.a_log, self.dt_bias)
        step: GDNStep = context.at(layer)
        step.prepare()
        qkv, gate, b, a = torch.split(self.in_proj(x), self.sizes, dim=1)
        heads = context.run(layer, DeltaInputs(qkv, a, b))
        mixed = gated_norm(heads, gate.view(-1, *self.heads), self.norm.weight, self.norm.eps)
        out: Tensor = self.out_proj(mixed.flatten(1))
        return out

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """Tensors that belong to neither a projection nor a norm."""
        yield f"{name}.conv1d.weight", self.conv_weight
        yield f"{name}.A_log", self.a_log
        yield f"{name}.dt_bias", self.dt_bias


def split_projection(name: str, tensor: Tensor, net: DeltaNetSpec) -> Iterator[tuple[str, Tensor]]:
    """Split a projection that some checkpoints store by key head, queries beside keys beside values, into its parts.

    Any other tensor of a delta net is returned unchanged.
    """
    prefix, _, kind = name.removesuffix(".weight").rpartition(".")
    per_key = net.num_v_heads // net.num_k_heads
    if kind == "conv1d":
        yield name, tensor.squeeze(1) if tensor.ndim == 3 else tensor
    elif kind == "in_proj_qkvz":
        q, k, v, z = _by_kind(name, tensor, net, [net.k_dim, net.k_dim, per_key * net.v_dim, per_key * net.v_dim])
        yield f"{prefix}.in_proj_qkv.weight", torch.cat([q, k, v])
        yield f"{prefix}.in_proj_z.weight", z
    elif kind == "in_proj_ba":
        b, a = _by_kind(name, tensor, net, [per_key, per_key])
        yield f"{prefix}.in_proj_b.weight", b
        yield f"{prefix}.in_proj_a.weight", a
    else:
        yield name, tensor


def _by_kind(name: str, tensor: Tensor, net: DeltaNetSpec, sizes: list[int]) -> list[Tensor]:
    rows = net.num_k_heads * sum(sizes)
    if tensor.ndim != 2 or tensor.shape[0] != rows:
        raise ModelError(f"tensor '{name}' has shape {list(tensor.shape)}, the config says {rows} rows")
    by_head = tensor.view(net.num_k_heads, sum(sizes), tensor.shape[1])
    return [part.flatten(0, 1) for part in torch.split(by_head, sizes, dim=1)]
