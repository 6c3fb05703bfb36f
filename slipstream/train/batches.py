"""Which texts each step learns from: a function of seed and step alone, so that a training that goes on agrees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.train.data import Texts
from slipstream.train.teacher import padded_length

_POOL = 16  # batches' worth of texts that are sorted by length together: less padding, and still in random order


class Batch(NamedTuple):
    token_ids: Tensor  # [rows, length] int64, padded with 0
    learnt: Tensor  # [rows, length] bool: positions whose next token is to be predicted
    answered: Tensor  # [rows, length] bool: those of them that are the answer's
    where: Tensor  # [rows, length] int64: the place of each token among those of all texts; -1 behind the end


class Batches:
    def __init__(self, texts: Texts, held_out: bool, batch_tokens: int, num_steps: int, seed: int) -> None:
        self._texts, self._batch_tokens, self._num_steps, self._seed = texts, batch_tokens, num_steps, seed
        self._indices = texts.where(held_out)
        # The epochs so far: first step and the texts of each batch. The last one grows the list when it is used up.
        self._epochs: list[tuple[int, list[Tensor]]] = []

    def at(self, step: int) -> Batch:
        epoch = 0
        while step >= self._epoch(epoch)[0] + len(self._epoch(epoch)[1]):
            epoch += 1
        begin, groups = self._epoch(epoch)
        return self.batch_of(groups[step - begin])

    def _epoch(self, epoch: int) -> tuple[int, list[Tensor]]:
        while len(self._epochs) <= epoch:
            begin = self._epochs[-1][0] + len(self._epochs[-1][1]) if self._epochs else 0
            self._epochs.append((begin, self._plan(len(self._epochs))))
        return self._epochs[epoch]

    @property
    def num_an_epoch(self) -> int:
        """Of the first, and nearly of the others."""
        return len(self._epoch(0)[1])

    def in_order(self) -> Iterator[Batch]:
        """Every text once, by length."""
        by_length = self._indices[self._texts.lengths[self._indices].argsort(stable=True)]
        return (self.batch_of(group) for group in self._cut(by_length))

    def _plan(self, epoch: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
        shuffled = self._indices[torch.randperm(len(self._indices), generator=generator)]
        mean_len = max(1, int(self._texts.lengths[self._indices].double().mean()))
        groups: list[Tensor] = []
        for pool in torch.split(shuffled, max(1, _POOL * self._batch_tokens // mean_len)):
            groups += self._cut(pool[self._texts.lengths[pool].argsort(stable=True)])
        return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]

    def _cut(self, indices: Tensor) -> list[Tensor]:
        """Neighbours together, as many as fit when all are padded to the longest, which is the last."""
        lengths, groups, begin = self._texts.lengths[indices].tolist(), [], 0
        for end in range(1, len(lengths) + 1):
            full = end == len(lengths) or (end + 1 - begin) * padded_length(lengths[end]) > self._batch_tokens
            if full:
                groups.append(indices[begin:end])
                begin = end
        return groups

    def batch_of(self, group: Tensor) -> Batch:
        texts, lengths = self._texts, self._texts.lengths[group].unsqueeze(1)
        places = torch.arange(padded_length(int(lengths.max()))).unsqueeze(0)
        where = (texts.starts[group].unsqueeze(1) + places).masked_fill_(places >= lengths, -1)
        token_ids = texts.token_ids[where.clamp(min=0)].long().masked_fill_(where < 0, 0)
        # Every step predicts at the same positions, so each needs as many tokens before it as there are steps.
        begins = texts.learn_from[group].unsqueeze(1).clamp(min=self._num_steps + 1)
        learnt = (places + 1 >= begins) & (places + 1 < lengths)
        return Batch(token_ids, learnt, learnt & (places + 1 >= texts.answer_from[group].unsqueeze(1)), where)
