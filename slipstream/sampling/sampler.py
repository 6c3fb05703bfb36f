"""The order of the logits operations, from raw logits to one token a row.

What every position may hold at all comes first (mask, bias, bad words, least length), then what depends on the history
(penalties), then the shape of the distribution (temperature, top-k, top-p, min-p), then the draw.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor

from slipstream.sampling.bad_words import ban_bad_words
from slipstream.sampling.check_logits import check_logits
from slipstream.sampling.draw import draw_tokens
from slipstream.sampling.logit_bias import apply_logit_bias
from slipstream.sampling.logprobs import pack_logprobs
from slipstream.sampling.mask import apply_mask
from slipstream.sampling.min_p import apply_min_p
from slipstream.sampling.min_tokens import hold_back_stops
from slipstream.sampling.penalties import apply_penalties
from slipstream.sampling.temperature import apply_temperature
from slipstream.sampling.top_k import apply_top_k
from slipstream.sampling.top_p import apply_top_p
from slipstream.types import Request


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What sampling reads of every request row, on the device. All are [num_rows] unless said otherwise."""

    temperature: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    repetition: Tensor  # float32
    frequency: Tensor  # float32
    presence: Tensor  # float32
    seeds: Tensor  # [num_rows, 2] int32
    choice: Tensor  # int32
    num_bias: Tensor  # int32
    bias_ids: Tensor  # [num_rows, max_bias] int32
    bias_values: Tensor  # [num_rows, max_bias] float32
    num_bad_words: Tensor  # int32
    bad_words: Tensor  # [num_rows, max_words, max_tokens] int32
    stop_ids: Tensor  # [num_rows, max_stop_ids] int32
    min_total: Tensor  # int32
    prompt_len: Tensor  # int32
    token_ids: Tensor  # [num_rows, max_len] int32; drafts stand behind a row's tokens


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """Which operations a batch needs at all. Host knowledge, so that a greedy batch pays for nothing else."""

    noise: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    logit_bias: bool = False
    bad_words: bool = False
    min_tokens: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, request: Request) -> SamplingNeeds:
        params = request.params
        noise = bool(params.temperature)
        repeats = params.repetition_penalty not in (None, 1.0)
        return cls(
            noise=noise,
            top_k=noise and bool(params.top_k),
            top_p=noise and params.top_p is not None and params.top_p < 1.0,
            min_p=noise and bool(params.min_p),
            penalties=repeats or bool(params.frequency_penalty) or bool(params.presence_penalty),
            logit_bias=bool(params.logit_bias),
            bad_words=bool(request.bad_word_ids),
            min_tokens=params.min_tokens > 0,
            logprobs=params.logprobs is not None,
        )

    def __or__(self, other: SamplingNeeds) -> SamplingNeeds:
        return SamplingNeeds(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(self)))


_NOTHING, _NOISE_ALONE = SamplingNeeds(), SamplingNeeds(noise=True)


class Sampled(NamedTuple):
    token_ids: Tensor  # [n] int64
    failed: Tensor  # [n] bool: the logits held no usable number
    logprobs: Tensor | None  # [n, LOGPROB_WIDTH] int32, packed


class Positions(NamedTuple):
    """What the rows of a step's logits belong to. A request has one for its next token and one behind each draft."""

    rows: Tensor  # [n] int32: the request row; the scratch row in padding
    positions: Tensor  # [n] int32: where the token will stand, so how many come before it


def sample(
    logits: Tensor,  # [n, vocab]
    rows: SamplingRows,
    at: Positions,
    needs: SamplingNeeds,
    mask: Tensor | None = None,  # [n, ceil(vocab / 32)] int32 bits, of positions that a grammar watches
) -> Sampled:
    rest = (rows.temperature, rows.seeds, at.positions, rows.choice, needs.noise)
    if mask is None and needs in (_NOTHING, _NOISE_ALONE):
        return Sampled(*draw_tokens(logits, at.rows, *rest, scaled=False), None)
    raw, failed = check_logits(logits)
    token_ids, _ = draw_tokens(process(raw, rows, at, needs, mask), at.rows, *rest, scaled=True)
    return Sampled(token_ids, failed, pack_logprobs(raw, token_ids) if needs.logprobs else None)


def process(logits: Tensor, rows: SamplingRows, at: Positions, needs: SamplingNeeds, mask: Tensor | None) -> Tensor:
    """Logits of the distribution to draw from; of a greedy row only the largest counts."""
    owners = at.rows
    if mask is not None:
        logits = apply_mask(logits, mask)
    if needs.logit_bias:
        logits = apply_logit_bias(logits, owners, rows.num_bias, rows.bias_ids, rows.bias_values)
    if needs.bad_words:
        logits = ban_bad_words(logits, owners, rows.token_ids, at.positions, rows.num_bad_words, rows.bad_words)
    if needs.min_tokens:
        logits = hold_back_stops(logits, owners, at.positions, rows.min_total, rows.stop_ids)
    if needs.penalties:
        history = (rows.token_ids, at.positions, rows.prompt_len)
        logits = apply_penalties(logits, owners, *history, rows.repetition, rows.frequency, rows.presence)
    if not needs.noise:
        return logits
    logits = apply_temperature(logits, rows.temperature[owners])
    if needs.top_k:
        logits = apply_top_k(logits, rows.top_k[owners])
    if needs.top_p:
        logits = apply_top_p(logits, rows.top_p[owners])
    if needs.min_p:
        logits = apply_min_p(logits, rows.min_p[owners])
    return logits
