"""The seam of several devices: what each has of a product is added up before anything else takes it.

Two devices that hold half of every column's weight each are played by one: weights are halved, and a reduction adds a
result to itself. In binary that is exact, so tokens are the same as without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.models import fused_layer
from slipstream.models.experts import Experts, ExpertWeights
from slipstream.models.layers import Linear
from slipstream.weights.dense import Dense, DenseExperts
from tests import tiny_models
from tests.engine.drive import make_request, run

PROMPTS = [list(range(3, 3 + length)) for length in (5, 30, 1, 12)]


def build(folder: Path, **options: Any) -> Engine:
    given = {"model": str(folder), "dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 24, **options}
    return build_engine(EngineOptions.from_dict(given))


def generate(engine: Engine) -> list[list[int]]:
    outcomes = run(engine.core, [make_request(str(i), prompt, 20) for i, prompt in enumerate(PROMPTS)])
    return [outcomes[str(i)].token_ids for i in range(len(PROMPTS))]


def reduce_rows(network: nn.Module, calls: list[int], with_reduction: bool = True) -> None:
    """As tensor parallelism cuts: the products that the residual stream takes."""

    def add_both(partial: Tensor) -> Tensor:
        calls.append(partial.shape[0])
        return partial + partial

    for name, module in network.named_modules():
        if isinstance(module, Linear) and name.endswith(("o_proj", "down_proj")):
            module.matrix.dequantised().mul_(0.5)
            module.reduction = add_both if with_reduction else None
        elif isinstance(module, Experts):
            module.reduction = add_both if with_reduction else None
        elif isinstance(module, ExpertWeights):
            assert isinstance(module.matrices, DenseExperts)
            module.matrices.down.mul_(0.5)


@torch.inference_mode()
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3-moe"])
def test_a_reduction_is_between_product_and_residual(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, fused: bool
) -> None:
    folder = tiny_models.save(tiny_models.build(kind), tmp_path)
    expected = generate(build(folder))
    if fused:
        monkeypatch.setattr(fused_layer, "max_fused_tokens", lambda like, weights: 16)
    engine, calls = build(folder), []
    network = engine.core.runner.program.model
    assert isinstance(network, nn.Module)
    reduce_rows(network, calls)
    assert generate(engine) == expected
    assert len(calls) > 20 and min(calls) <= 16 < max(calls)
    broken = build(folder)
    assert isinstance(broken.core.runner.program.model, nn.Module)
    reduce_rows(broken.core.runner.program.model, calls, with_reduction=False)
    assert generate(broken) != expected, "a product that is not added up is another network"


@torch.inference_mode()
def test_a_bias_is_added_once() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(8, {"o_proj": 6}, bias=True)
    linear.open_weights(Dense(), "o_proj")
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(3, 8, generator=generator)
    expected = linear(x)
    linear.matrix.dequantised().mul_(0.5)
    linear.reduction = lambda partial: partial + partial
    torch.testing.assert_close(linear(x), expected)
    linear.reduction = lambda partial: partial
    assert not torch.allclose(linear(x), expected)


@torch.inference_mode()
def test_a_product_alone_is_added_up_too() -> None:
    """One that is followed by no sum, of few tokens: in a draft head it mixes what the head attends from."""
    linear = Linear(8, {"fc": 6}, bias=True)
    linear.open_weights(Dense(), "fc")
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert linear.matrix.tile_key("plain") is not None, "it may be the kernel for few tokens"
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    expected = fused_layer.project_few(linear, x)
    linear.matrix.dequantised().mul_(0.5)
    linear.reduction = lambda partial: partial + partial
    torch.testing.assert_close(fused_layer.project_few(linear, x), expected)
