"""The order of the logits operations, from raw logits to one token a row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.sampling.argmax import argmax, check_logits
from slipstream.sampling.gumbel import add_gumbel
from slipstream.sampling.temperature import apply_temperature
from slipstream.sampling.top_k import apply_top_k
from slipstream.sampling.top_p import apply_top_p
from slipstream.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of every request row, on the device."""

    temperature: Tensor  # [num_rows] float32
    top_k: Tensor  # [num_rows] int32
    top_p: Tensor  # [num_rows] float32
    seeds: Tensor  # [num_rows, 2] int32
    num_tokens: Tensor  # [num_rows] int32: the index of the token to be drawn


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """Which operations a batch needs at all. Host knowledge, so that a greedy batch pays for nothing else."""

    noise: bool = False
    top_k: bool = False
    top_p: bool = False

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingNeeds:
        noise = bool(params.temperature)
        return cls(noise, noise and bool(params.top_k), noise and params.top_p is not None and params.top_p < 1.0)

    def __or__(self, other: SamplingNeeds) -> SamplingNeeds:
        return SamplingNeeds(self.noise or other.noise, self.top_k or other.top_k, self.top_p or other.top_p)


def sample(
    logits: Tensor,  # [padded_reqs, vocab]
    rows: SamplingRows,
    batch_rows: Tensor,  # [padded_reqs] int32
    needs: SamplingNeeds,
) -> tuple[Tensor, Tensor]:  # token ids [padded_reqs] int64; failed [padded_reqs] bool
    logits, failed = check_logits(logits)
    if needs.noise:
        temperature = rows.temperature[batch_rows]
        logits = apply_temperature(logits, temperature)
        if needs.top_k:
            logits = apply_top_k(logits, rows.top_k[batch_rows])
        if needs.top_p:
            logits = apply_top_p(logits, rows.top_p[batch_rows])
        logits = add_gumbel(logits, temperature, rows.seeds[batch_rows], rows.num_tokens[batch_rows])
    return argmax(logits), failed
