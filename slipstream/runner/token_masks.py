"""The pool of masks on the device, and how a step's masks get there: one copy, and one scatter of those that are new.

What the host has to say in the second half of a step: which mask each of its logits has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.device.interface import Device, Event
from slipstream.plan import StepMasks
from slipstream.runner.rings import Ring
from slipstream.runner.staging import Int32s
from slipstream.sampling.mask import TokenMasks, store_masks


@dataclass(slots=True)
class _MaskSlot:
    pinned: Tensor  # [capacity] int32
    on_device: Tensor  # [capacity] int32
    event: Event  # the step no longer reads either


class MaskStore:
    def __init__(self, device: Device, num_masks: int, vocab_size: int, max_num_logits: int, depth: int) -> None:
        self._device = device
        self._num_words = -(-vocab_size // 32)
        torch_device = device.torch_device
        self.pool = torch.zeros(num_masks, self._num_words, dtype=torch.int32, device=torch_device)
        # A row for each logit, and for each new mask its row and its words.
        size = (max_num_logits * (2 + self._num_words),)
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

    def stage(self, masks: StepMasks, padded_logits: int) -> TokenMasks:
        """Queue the copy, and the writing of what is new. ``release`` follows when the step is queued."""
        slot = self._slot = self._ring.acquire()
        num_new = len(masks.destinations)
        first_word = padded_logits + num_new
        end = first_word + num_new * self._num_words
        self._fill(slot.pinned[:end].numpy(), masks, padded_logits)
        self._device.copy_async(slot.on_device[:end], slot.pinned[:end])
        if num_new:
            words = slot.on_device[first_word:end].view(num_new, self._num_words)
            store_masks(self.pool, slot.on_device[padded_logits:first_word], words)
        return TokenMasks(self.pool, slot.on_device[:padded_logits])

    def release(self) -> None:
        """All that reads the staged masks is queued."""
        assert self._slot is not None
        self._slot.event.record(self._device.compute_stream)

    @staticmethod
    def _fill(packed: Int32s, masks: StepMasks, padded_logits: int) -> None:
        num_logits, first_word = len(masks.rows), padded_logits + len(masks.destinations)
        packed[:num_logits] = masks.rows
        packed[num_logits:padded_logits] = -1
        packed[padded_logits:first_word] = np.asarray(masks.destinations, dtype=np.int32)
        packed[first_word:] = masks.words.reshape(-1)
