"""From raw logits to one token per row: the operations that a batch needs, in order, and then the draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.request import Request
from slipstream.sampling import temperature
from slipstream.sampling.check_logits import check_logits
from slipstream.sampling.draw import DrawKeys, draw_tokens
from slipstream.sampling.exact_logprobs import pack_exact_logprobs
from slipstream.sampling.logprobs import pack_logprobs
from slipstream.sampling.mask import TokenMasks, apply_mask
from slipstream.sampling.operation import Positions, SamplingOperation, SamplingRows
from slipstream.sampling.registry import operations

_NOISE = frozenset((temperature.OPERATION.name,))


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """Which operations a batch needs. Known on the host, so that a greedy batch runs none of the others."""

    operations: frozenset[str] = frozenset()
    logprobs: bool = False

    @classmethod
    def for_request(cls, request: Request, known: Sequence[SamplingOperation] | None = None) -> SamplingNeeds:
        """``known``: the operations of the engine; those of the registry if left out."""
        needed = frozenset(o.name for o in (operations() if known is None else known) if o.needed(request))
        return cls(needed, request.params.logprobs is not None)

    @property
    def noise(self) -> bool:
        """Whether any request of the batch is not greedy."""
        return not self.operations.isdisjoint(_NOISE)

    def __or__(self, other: SamplingNeeds) -> SamplingNeeds:
        return SamplingNeeds(self.operations | other.operations, self.logprobs or other.logprobs)


NO_NEEDS = SamplingNeeds()
NOISE_ALONE = SamplingNeeds(_NOISE)  # requests at any temperature, greedy ones included


class Sampled(NamedTuple):
    token_ids: Tensor  # [n] int64
    failed: Tensor  # [n] bool: the logits held no usable number
    logprobs: Tensor | None  # [n, LOGPROB_WIDTH] int32, packed


def sample(
    logits: Tensor,  # [n, vocab]
    rows: SamplingRows,
    at: Positions,
    needs: SamplingNeeds,
    masks: TokenMasks | None = None,  # for positions with a grammar
) -> Sampled:
    if rows.exact and logits.device.type == "cpu" and logits.shape[0] > 1:
        return _sample_one_by_one(logits, rows, at, needs, masks)
    keys = DrawKeys(rows.temperature, rows.seeds, at.positions, rows.choice)
    if masks is None and needs in (NO_NEEDS, NOISE_ALONE):
        return Sampled(*draw_tokens(logits, at.rows, keys, needs.noise, scaled=False), None)
    raw, failed = check_logits(logits)
    if masks is not None:
        raw = apply_mask(raw, masks)
    token_ids, is_empty = draw_tokens(process(raw, rows, at, needs), at.rows, keys, needs.noise, scaled=True)
    if masks is not None:  # other parameters may forbid every token that a grammar allows
        failed = failed | is_empty
    pack = pack_exact_logprobs if rows.exact else pack_logprobs
    return Sampled(token_ids, failed, pack(raw, token_ids) if needs.logprobs else None)


def _sample_one_by_one(
    logits: Tensor, rows: SamplingRows, at: Positions, needs: SamplingNeeds, masks: TokenMasks | None
) -> Sampled:
    """On a CPU torch computes logarithms and the like in vectors, and what is left over at the end in another way."""
    found = []
    for i in range(logits.shape[0]):
        one = slice(i, i + 1)
        own = None if masks is None else masks._replace(rows=masks.rows[one])
        found.append(sample(logits[one], rows, Positions(at.rows[one], at.positions[one]), needs, own))
    packed = [each.logprobs for each in found if each.logprobs is not None]
    token_ids, failed = torch.cat([each.token_ids for each in found]), torch.cat([each.failed for each in found])
    return Sampled(token_ids, failed, torch.cat(packed) if packed else None)


def process(logits: Tensor, rows: SamplingRows, at: Positions, needs: SamplingNeeds) -> Tensor:
    """Logits of the distribution to draw from; in a greedy row only the largest matters."""
    for operation in rows.operations:
        if operation.name in needs.operations:
            logits = operation.apply(logits, rows, at)
    return logits
