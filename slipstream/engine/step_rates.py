"""The cost of steps before any is measured: from the sizes of the model and what usual machines reach.

They only decide how the first few prompts are cut. Once steps are measured, those measurements decide
(``scheduler.step_model``).
"""

from __future__ import annotations

from typing import NamedTuple

from slipstream.config import ModelConfig, NetworkSize, StepRates


class _Machine(NamedTuple):
    """What one reaches in steps, not its peaks."""

    flops: float  # a second, of products
    attention_flops: float
    bandwidth: float  # bytes a second
    launch_s: float  # of a step, beside its bytes


_GPU = _Machine(500e12, 250e12, 3e12, 1e-3)
_CPU = _Machine(100e9, 20e9, 15e9, 1e-3)


def expected_rates(model: ModelConfig, size: NetworkSize, dtype: str, has_gpu: bool) -> StepRates:
    machine = _GPU if has_gpu else _CPU
    step = machine.launch_s + size.num_bytes / machine.bandwidth
    pair_flops = 4 * model.num_heads * model.head_dim * max(1, model.num_attention_layers)
    return StepRates(
        step=step,
        token=max(1, 2 * size.num_params) / machine.flops,
        cached_key=max(1, model.kv_bytes_per_token(dtype)) / machine.bandwidth,
        pair=pair_flops / machine.attention_flops,
        draft=step / 16,  # one layer of many, and the logits
    )
