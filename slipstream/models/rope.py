"""Rotary frequencies, and the table of cosines and sines that kernels read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.config import ModelConfig, RopeConfig
from slipstream.errors import ModelError

_PIECE = 1 << 18  # positions


def inverse_frequencies(rope: RopeConfig, max_position: int) -> Tensor:
    """[rotary_dim / 2] float32, or [max_position, rotary_dim / 2] where positions differ in them.

    longrope: the long factors where the engine admits requests beyond the original context, else the short ones. The
    choice holds for every request, because a cache cannot be rotated again when one of them grows past that point.
    """
    least = 4 if rope.kind == "dynamic" else 2
    if rope.rotary_dim < least or rope.rotary_dim % 2:
        raise ModelError(
            f"the config rotates {rope.rotary_dim} dimensions of a head ('{rope.kind}'); an even number of at least "
            f"{least} is needed"
        )
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.freq_factors:
        return inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    if rope.kind == "yarn":
        return _yarn(inv_freq, rope)
    if rope.kind == "dynamic":
        return _dynamic(exponents, rope, max_position)
    if rope.kind == "longrope":
        factors = rope.long_factors if max_position > rope.original_max_position else rope.short_factors
        return inv_freq / torch.tensor(factors, dtype=torch.float32)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: low frequencies are divided by the factor, high ones kept, those between interpolated."""
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / rope.factor, mixed)
    return torch.where(wavelength < shortest, inv_freq, scaled)


def _yarn(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Frequencies with many rotations within the original context are kept, those with few divided by the factor.

    Between the two the share of the divided frequency rises linearly with the index of the pair.
    """

    def pair_that_turns(times: float) -> float:
        return (rope.rotary_dim * math.log(rope.original_max_position / (times * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - first
    stretched = (steps / (last - first if last != first else 0.001)).clamp(0, 1)
    return inv_freq / rope.factor * stretched + inv_freq * (1 - stretched)


def _dynamic(exponents: Tensor, rope: RopeConfig, max_position: int) -> Tensor:
    """The base grows with the sequence; each position has the base of a sequence that ends with it.

    A cached key stays as it was rotated, so this is what decoding one token at a time gives: positions within the
    original context have the original base, and position p beyond it the base for length p + 1. A prompt that is itself
    longer than the original context gets the same, whereas ``transformers`` would give all of it the base of its full
    length; only our result does not depend on how a prompt is cut into steps.
    """
    lengths = torch.arange(1, max_position + 1, dtype=torch.float64).clamp(min=rope.original_max_position)
    growth = rope.factor * lengths / rope.original_max_position - (rope.factor - 1)
    base = (rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))).float()
    return 1.0 / (base.unsqueeze(1) ** exponents)


def cos_sin_table(rope: RopeConfig, max_position: int, device: torch.device) -> Tensor:
    """[max_position, 2, rotary_dim / 2] float32, the attention factor included."""
    # On the CPU, whatever is being built: the same numbers everywhere, also for networks without memory.
    with torch.device("cpu"):
        inv_freq = inverse_frequencies(rope, max_position)
        table = torch.empty(max_position, 2, inv_freq.shape[-1], dtype=torch.float32)
        for start in range(0, max_position, _PIECE):  # in pieces, since the angles of long contexts take memory too
            positions = torch.arange(start, min(start + _PIECE, max_position))
            own = inv_freq if inv_freq.ndim == 1 else inv_freq[start : start + _PIECE]
            angles = positions.float().unsqueeze(1) * own
            table[start : start + _PIECE, 0], table[start : start + _PIECE, 1] = angles.cos(), angles.sin()
        if rope.attention_factor != 1.0:
            table *= rope.attention_factor
    return table.to(device)


def layer_tables(config: ModelConfig, max_position: int, device: torch.device) -> list[Tensor]:
    """``cos_sin_table`` of each layer; layers with a window may have a rope of their own."""
    full = cos_sin_table(config.rope, max_position, device)
    windowed = cos_sin_table(config.window_rope, max_position, device) if config.window_rope else full
    return [windowed if config.window(idx) else full for idx in range(config.num_layers)]
