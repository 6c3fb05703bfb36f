"""Rotary frequencies, and the table of cosines and sines that kernels read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """[rotary_dim / 2] float32."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.freq_factors:
        return inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / rope.factor, mixed)
    return torch.where(wavelength < shortest, inv_freq, scaled)


def cos_sin_table(rope: RopeConfig, max_position: int, device: torch.device) -> Tensor:
    """[max_position, 2, rotary_dim / 2] float32."""
    angles = torch.outer(torch.arange(max_position).float(), inverse_frequencies(rope))
    return torch.stack([angles.cos(), angles.sin()], dim=1).to(device)
