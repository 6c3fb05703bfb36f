"""All layers of an encoder in one call, against the formulas of a layer in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels import native
from slipstream.kernels.linear.dense_linear import PackedWeight, cut_panels, panel_width
from slipstream.kernels.native.encoder_stack import EncoderStack, EncoderStackLayer, encoder_stack

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C kernels here")
EPS = 1e-5


def draw_layer(hidden: int, size: int) -> dict[str, Tensor]:
    matrices = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (size, hidden), "down": (hidden, size)}
    norms = {"attention_norm": hidden, "attention_shift": hidden, "norm": hidden, "shift": hidden}
    biases = {f"{name}_bias": shape[0] for name, shape in matrices.items()}
    drawn = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in matrices.items()}
    return drawn | {name: torch.randn(count) for name, count in (norms | biases).items()}


def pack(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    width = panel_width(torch.device("cpu"), torch.float32)
    assert width is not None
    packed = cut_panels(weight, width)
    return packed._replace(panels=packed.panels.to(dtype))


def norm(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    centred = x - x.mean(dim=1, keepdim=True)
    return centred / ((centred**2).mean(dim=1, keepdim=True) + EPS).sqrt() * weight + shift


def run_layer(x: Tensor, layer: dict[str, Tensor], heads: int) -> Tensor:
    w = {name: tensor.double() for name, tensor in layer.items()}
    tokens, hidden = x.shape
    projected = norm(x, w["attention_norm"], w["attention_shift"]) @ w["qkv"].T + w["qkv_bias"]
    q, k, v = projected.view(tokens, 3, heads, hidden // heads).permute(1, 2, 0, 3)
    weights = torch.softmax(q @ k.transpose(1, 2) * (hidden // heads) ** -0.5, dim=-1)
    x = x + (weights @ v).transpose(0, 1).reshape(tokens, hidden) @ w["out"].T + w["out_bias"]
    inner = norm(x, w["norm"], w["shift"]) @ w["up"].T + w["up_bias"]
    return x + (inner * (1 + torch.erf(inner / 2**0.5)) / 2) @ w["down"].T + w["down_bias"]


@pytest.mark.parametrize("num_tokens", [1, 12, 37, 130])
@pytest.mark.parametrize(("hidden", "heads", "size"), [(48, 6, 80), (64, 1, 40), (128, 2, 256)])
def test_layers(num_tokens: int, hidden: int, heads: int, size: int) -> None:
    torch.manual_seed(num_tokens)
    drawn = [draw_layer(hidden, size) for _ in range(3)]
    x = torch.randn(num_tokens, hidden)
    expected = x.double()
    layers = []
    for i, layer in enumerate(drawn):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i]
        for name in ("qkv", "out", "up", "down"):
            layer[name] = layer[name].to(dtype).float()
        expected = run_layer(expected, layer, heads)
        packed = {name: pack(layer[name], dtype) for name in ("qkv", "out", "up", "down")}
        layers.append(EncoderStackLayer(**(layer | packed)))  # type: ignore[arg-type]
    given = x.clone()
    out = encoder_stack(x, EncoderStack(layers, heads, EPS))
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(x, given)
