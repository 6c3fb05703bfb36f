"""Which texts each step trains on: a function of seed and step alone, so that a resumed training sees the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.train.data import Texts
from slipstream.train.target import padded_length

_POOL = 16  # batches whose texts are sorted by length together: less padding, and still in random order


class Batch(NamedTuple):
    token_ids: Tensor  # [rows, length] int64, padded with 0
    trained: Tensor  # [rows, length] bool: positions whose next token is a training target
    answered: Tensor  # [rows, length] bool: those of them in the answer
    text_indices: Tensor  # [rows, length] int64: the index of each token in all texts concatenated; -1 for padding


class Batches:
    def __init__(self, texts: Texts, held_out: bool, batch_tokens: int, num_steps: int, seed: int) -> None:
        self._texts, self._batch_tokens, self._num_steps, self._seed = texts, batch_tokens, num_steps, seed
        self._indices = texts.where(held_out)
        # First step of each epoch, and the texts of each of its batches. Epochs are planned when they begin.
        self._epochs: list[tuple[int, list[Tensor]]] = []

    def at(self, step: int) -> Batch:
        epoch = 0
        while step >= self._epoch(epoch)[0] + len(self._epoch(epoch)[1]):
            epoch += 1
        begin, groups = self._epoch(epoch)
        return self.make_batch(groups[step - begin])

    def _epoch(self, epoch: int) -> tuple[int, list[Tensor]]:
        while len(self._epochs) <= epoch:
            begin = self._epochs[-1][0] + len(self._epochs[-1][1]) if self._epochs else 0
            self._epochs.append((begin, self._plan(len(self._epochs))))
        return self._epochs[epoch]

    @property
    def num_per_epoch(self) -> int:
        """Batches of the first epoch; others have about as many."""
        return len(self._epoch(0)[1])

    def in_order(self) -> Iterator[Batch]:
        """Every text once, sorted by length."""
        by_length = self._indices[self._texts.lengths[self._indices].argsort(stable=True)]
        return (self.make_batch(group) for group in self._cut(by_length))

    def _plan(self, epoch: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
        shuffled = self._indices[torch.randperm(len(self._indices), generator=generator)]
        mean_len = max(1, int(self._texts.lengths[self._indices].double().mean()))
        groups: list[Tensor] = []
        for pool in torch.split(shuffled, max(1, _POOL * self._batch_tokens // mean_len)):
            groups += self._cut(pool[self._texts.lengths[pool].argsort(stable=True)])
        return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]

    def _cut(self, indices: Tensor) -> list[Tensor]:
        """Batches of neighbours, as many as fit when all are padded to the longest, which is the last."""
        lengths, groups, begin = self._texts.lengths[indices].tolist(), [], 0
        for end in range(1, len(lengths) + 1):
            full = end == len(lengths) or (end + 1 - begin) * padded_length(lengths[end]) > self._batch_tokens
            if full:
                groups.append(indices[begin:end])
                begin = end
        return groups

    def make_batch(self, group: Tensor) -> Batch:
        texts, lengths = self._texts, self._texts.lengths[group].unsqueeze(1)
        offsets = torch.arange(padded_length(int(lengths.max()))).unsqueeze(0)
        text_indices = (texts.starts[group].unsqueeze(1) + offsets).masked_fill_(offsets >= lengths, -1)
        token_ids = texts.token_ids[text_indices.clamp(min=0)].long().masked_fill_(text_indices < 0, 0)
        # All draft steps predict at the same positions, so each position needs one earlier token per step.
        begins = texts.learn_from[group].unsqueeze(1).clamp(min=self._num_steps + 1)
        trained = (offsets + 1 >= begins) & (offsets + 1 < lengths)
        answered = trained & (offsets + 1 >= texts.answer_from[group].unsqueeze(1))
        return Batch(token_ids, trained, answered, text_indices)
