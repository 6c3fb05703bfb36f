"""Whisper's encoder: two convolutions over a spectrogram, then layers in which every entry attends to all others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels.elementwise.gelu import gelu
from slipstream.kernels.native.encoder_stack import EncoderStack, EncoderStackLayer, encoder_stack
from slipstream.models.encoder import LayerNorm
from slipstream.models.layers import Layer, Linear
from slipstream.source_encoder_config import SourceEncoderConfig
from slipstream.weights.dense import DenseWeight
from slipstream.weights.matrix import Matrix, Slot
from slipstream.weights.panels import Panels

EPS = 1e-5  # of every norm; configs do not say it
FRAMES_PER_ENTRY = 2  # the second convolution halves their number
_TAPS = 3  # neighbouring frames that a convolution reads


class Positions(Layer):
    """A learned vector for each position; the sinusoids of an encoder are stored as well."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size), requires_grad=False)

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", self.weight


class Convolution(Layer):
    """Over three neighbouring frames, then gelu: [frames, channels] -> [frames / stride, out channels].

    A product of every three frames, which lie side by side, with a matrix.
    """

    matrix: Matrix

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = _weight(out_channels, channels, _TAPS)  # None once it is finished
        self.bias = _weight(out_channels)
        self._stride = stride

    def forward(self, x: Tensor) -> Tensor:
        num_frames, channels = x.shape
        padded = F.pad(x, (0, 0, 1, 1)).contiguous()
        size = ((num_frames - 1) // self._stride + 1, _TAPS * channels)
        windows = padded.as_strided(size, (self._stride * channels, 1))
        return gelu(self.matrix.project(windows, self.bias), False)

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        assert self.weight is not None, "the weights are finished"
        yield f"{name}.weight", self.weight
        yield f"{name}.bias", self.bias

    def finish_weights(self, device: torch.device) -> None:
        if self.weight is not None:
            by_frame = self.weight.data.transpose(1, 2).flatten(1)
            self.matrix, self.weight = DenseWeight.from_tensor(by_frame).finish(device), None


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class EncoderAttention(Layer):
    """Every entry sees every other."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.qkv_proj = Linear(size, dict.fromkeys(("q_proj", "k_proj", "v_proj"), size), bias=True)
        self.out_proj = Linear(size, {"out_proj": size}, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv_proj(x).view(1, x.shape[0], 3, self._num_heads, -1)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(x.shape))
        return out


class EncoderLayer(Layer):
    def __init__(self, size: int, config: SourceEncoderConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = LayerNorm(size, EPS)
        self.self_attn = EncoderAttention(size, config.num_heads)
        self.final_layer_norm = LayerNorm(size, EPS)
        self.fc1 = Linear(size, {"fc1": config.intermediate_size}, bias=True)
        self.fc2 = Linear(config.intermediate_size, {"fc2": size}, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        out: Tensor = x + self.fc2(gelu(self.fc1(self.final_layer_norm(x)), False))
        return out

    def stack_layer(self) -> EncoderStackLayer | None:
        """Its weights for the operation over all layers on a CPU; None: layers run one by one."""
        attention, norm, last = self.self_attn, self.self_attn_layer_norm, self.final_layer_norm
        products = (attention.qkv_proj, attention.out_proj, self.fc1, self.fc2)
        if any(not isinstance(one.matrix, Panels) or one.reduction is not None for one in products):
            return None
        packed = [cast(Panels, one.matrix).packed for one in products]
        biases = [cast(Tensor, one.bias) for one in products]
        (qkv, out, up, down), (qkv_bias, out_bias, up_bias, down_bias) = packed, biases
        return EncoderStackLayer(
            attention_norm=norm.weight,
            attention_shift=norm.bias,
            qkv=qkv,
            qkv_bias=qkv_bias,
            out=out,
            out_bias=out_bias,
            norm=last.weight,
            shift=last.bias,
            up=up,
            up_bias=up_bias,
            down=down,
            down_bias=down_bias,
        )


class EncoderTrunk(nn.Module):
    def __init__(self, size: int, config: SourceEncoderConfig) -> None:
        super().__init__()
        self.conv1 = Convolution(config.num_bins, size, stride=1)
        self.conv2 = Convolution(size, size, stride=FRAMES_PER_ENTRY)
        self.embed_positions = Positions(config.max_entries, size)
        self.layers = nn.ModuleList(EncoderLayer(size, config) for _ in range(config.num_layers))
        self.layer_norm = LayerNorm(size, EPS)
        self._num_heads = config.num_heads
        self._stack: EncoderStack | None = None

    def forward(self, features: Tensor) -> Tensor:
        """[num_bins, num_frames] -> [num_entries, size]"""
        x = self.conv2(self.conv1(features.t()))
        x = x + self.embed_positions.weight[: x.shape[0]]
        if self._stack is not None:
            x = encoder_stack(x, self._stack)
        else:
            for layer in self.layers:
                x = layer(x)
        out: Tensor = self.layer_norm(x)
        return out

    def stack_layers(self) -> None:
        """Once the weights are finished: all layers as one operation, where there is one."""
        layers = [cast(EncoderLayer, layer).stack_layer() for layer in self.layers]
        found = [layer for layer in layers if layer is not None]
        self._stack = EncoderStack(found, self._num_heads, EPS) if len(found) == len(layers) else None
