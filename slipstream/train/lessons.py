"""What the target makes of the texts: read again for every batch, or once for all of them where memory allows."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.train.author import Advance
from slipstream.train.batches import Batch, Batches
from slipstream.train.teacher import Lesson, Teacher

_ROOM = 24 << 30  # bytes that are left for the training itself


class Lessons:
    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher
        self._kept: Lesson | None = None  # of all texts, one after another

    def of(self, batch: Batch) -> Lesson:
        place = self._teacher.device
        if self._kept is None:
            return self._teacher.read(sent(batch.token_ids, place))
        at = sent(batch.where.clamp(min=0).flatten(), place)
        features, normed = (part.index_select(0, at).view(*batch.where.shape, -1) for part in self._kept)
        return Lesson(features, normed)

    def fit(self, num_tokens: int) -> bool:
        """Whether a GPU has the memory to keep those of as many tokens."""
        place = self._teacher.device
        if place.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(place)
        return num_tokens * self._teacher.bytes_a_token + _ROOM <= free

    def keep(self, parts: tuple[Batches, ...], num_tokens: int, advance: Advance) -> None:
        """Read all texts now: always in the same order, so that a training that goes on finds the same numbers."""
        kept: Lesson | None = None
        done = 0
        for batches in parts:
            for batch in batches.in_order():
                lesson = self.of(batch)
                if kept is None:
                    kept = Lesson(*(part.new_empty(num_tokens, part.shape[-1]) for part in lesson))
                exists = (batch.where.flatten() >= 0).nonzero().flatten()
                source, at = (sent(one, self._teacher.device) for one in (exists, batch.where.flatten()[exists]))
                for whole, part in zip(kept, lesson, strict=True):
                    whole.index_copy_(0, at, part.flatten(0, 1).index_select(0, source))
                done += len(exists)
                advance("what the target makes of them", done, num_tokens)
        self._kept = kept


def sent(tensor: Tensor, place: torch.device) -> Tensor:
    """On the device, without waiting for what is queued there."""
    return tensor.pin_memory().to(place, non_blocking=True) if place.type == "cuda" else tensor
