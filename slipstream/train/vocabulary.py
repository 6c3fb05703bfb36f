"""The draft vocabulary: the tokens a head can draft, chosen by their frequency in the target's texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    target_ids: Tensor  # [size] int64, ascending: the target's id of each draft id
    target_size: int

    @property
    def d2t(self) -> Tensor:
        """[size] int64: the offset from a draft id to the target's id."""
        return self.target_ids - torch.arange(len(self.target_ids))

    @property
    def t2d(self) -> Tensor:
        """[target_size] bool: which of the target's tokens can be drafted."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.target_ids] = True
        return mask


def choose_vocabulary(
    token_ids: Tensor,  # [n] int32: the texts
    target_size: int,
    size: int,
    always: Iterable[int] = (),  # always included: tokens that end a text
) -> DraftVocabulary:
    """The most frequent tokens; ties go to the lower ids."""
    counts = torch.bincount(token_ids.long(), minlength=target_size)
    counts[[token_id for token_id in always if token_id < target_size]] = len(token_ids) + 1
    kept = counts.argsort(descending=True, stable=True)[: min(size, target_size)]
    return DraftVocabulary(kept.sort().values, target_size)


def coverage(vocabulary: DraftVocabulary, token_ids: Tensor) -> float:
    """The share of a text's tokens that are in the draft vocabulary."""
    return float(vocabulary.t2d[token_ids.long()].double().mean())
