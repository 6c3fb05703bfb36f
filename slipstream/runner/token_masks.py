"""The pool of masks on the device, and how a step's masks get there: one copy, and one scatter of those that are new.

What the host has to say in the second half of a step: which mask each of its logits has, and which tokens are certain
to follow the step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.device.interface import Device, Event
from slipstream.plan import CertainRun, StepMasks
from slipstream.runner.rings import Ring
from slipstream.runner.staging import Int32s
from slipstream.sampling.mask import TokenMasks, store_masks


class MaskSizes(NamedTuple):
    """The largest numbers of a step, and of the pool."""

    num_masks: int
    vocab_size: int
    num_logits: int
    num_reqs: int
    num_drafts: int


class StagedMasks(NamedTuple):
    """What a step has waited for, on the device."""

    masks: TokenMasks
    runs: Tensor | None  # [num_reqs, 1 + k] int32, as in ``place_certain_drafts``; None: no request has any


@dataclass(slots=True)
class _MaskSlot:
    pinned: Tensor  # [capacity] int32
    on_device: Tensor  # [capacity] int32
    event: Event  # the step no longer reads either


class MaskStore:
    def __init__(self, device: Device, sizes: MaskSizes, depth: int) -> None:
        self._device = device
        self._num_words = -(-sizes.vocab_size // 32)
        self._run_width = 1 + sizes.num_drafts
        torch_device = device.torch_device
        self.pool = torch.zeros(sizes.num_masks, self._num_words, dtype=torch.int32, device=torch_device)
        # A row for each logit, for each request a run of tokens, and for each new mask its row and its words.
        size = (sizes.num_logits * (2 + self._num_words) + sizes.num_reqs * self._run_width,)
        self._ring = Ring(
            [
                _MaskSlot(
                    device.pinned_empty(size, torch.int32),
                    torch.empty(size, dtype=torch.int32, device=torch_device),
                    device.event(),
                )
                for _ in range(depth)
            ]
        )
        self._slot: _MaskSlot | None = None

    def stage(self, masks: StepMasks, padded_logits: int, num_reqs: int) -> StagedMasks:
        """Queue the copy, and the writing of what is new. ``release`` follows when the step is queued."""
        slot = self._slot = self._ring.acquire()
        num_new, num_runs = len(masks.destinations), num_reqs if masks.runs else 0
        first_run = padded_logits + num_new
        first_word = first_run + num_runs * self._run_width
        end = first_word + num_new * self._num_words
        packed = slot.pinned[:end].numpy()
        packed[: len(masks.rows)] = masks.rows
        packed[len(masks.rows) : padded_logits] = -1
        packed[padded_logits:first_run] = np.asarray(masks.destinations, dtype=np.int32)
        self._fill_runs(packed[first_run:first_word].reshape(num_runs, self._run_width), masks.runs)
        packed[first_word:] = masks.words.reshape(-1)
        self._device.copy_async(slot.on_device[:end], slot.pinned[:end])
        if num_new:
            words = slot.on_device[first_word:end].view(num_new, self._num_words)
            store_masks(self.pool, slot.on_device[padded_logits:first_run], words)
        runs = slot.on_device[first_run:first_word].view(num_runs, self._run_width) if num_runs else None
        return StagedMasks(TokenMasks(self.pool, slot.on_device[:padded_logits]), runs)

    def release(self) -> None:
        """All that reads the staged masks is queued."""
        assert self._slot is not None
        self._slot.event.record(self._device.compute_stream)

    @staticmethod
    def _fill_runs(table: Int32s, runs: Sequence[CertainRun]) -> None:
        table[:] = -1
        for run in runs:
            table[run.place, 0] = run.num_accepted
            table[run.place, 1 : 1 + len(run.token_ids)] = run.token_ids
