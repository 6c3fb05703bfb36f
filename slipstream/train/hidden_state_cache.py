"""The target's hidden states of the training texts: computed for every batch, or once for all where memory allows."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.train.batches import Batch, Batches
from slipstream.train.target import HiddenStates, TargetModel
from slipstream.train.text_generation import OnCount

_TRAINING_BYTES = 24 << 30  # left free for the training itself


class HiddenStateCache:
    def __init__(self, target_model: TargetModel) -> None:
        self._target = target_model
        self._cached: HiddenStates | None = None  # of all texts, concatenated

    def get(self, batch: Batch) -> HiddenStates:
        device = self._target.device
        if self._cached is None:
            return self._target.read(to_device(batch.token_ids, device))
        indices = to_device(batch.text_indices.clamp(min=0).flatten(), device)
        shape = batch.text_indices.shape
        features, normed = (part.index_select(0, indices).view(*shape, -1) for part in self._cached)
        return HiddenStates(features, normed)

    def fits(self, num_tokens: int) -> bool:
        """Whether a GPU has the memory for the hidden states of this many tokens."""
        device = self._target.device
        if device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(device)
        return num_tokens * self._target.bytes_per_token + _TRAINING_BYTES <= free

    def fill(self, parts: tuple[Batches, ...], num_tokens: int, on_count: OnCount) -> None:
        """Compute all states now, in a fixed order, so that a resumed training finds the same numbers."""
        cached: HiddenStates | None = None
        done = 0
        for batches in parts:
            for batch in batches.in_order():
                hidden = self.get(batch)
                if cached is None:
                    cached = HiddenStates(*(part.new_empty(num_tokens, part.shape[-1]) for part in hidden))
                in_text = (batch.text_indices.flatten() >= 0).nonzero().flatten()
                source = to_device(in_text, self._target.device)
                indices = to_device(batch.text_indices.flatten()[in_text], self._target.device)
                for whole, part in zip(cached, hidden, strict=True):
                    whole.index_copy_(0, indices, part.flatten(0, 1).index_select(0, source))
                done += len(in_text)
                on_count("hidden states of the target", done, num_tokens)
        self._cached = cached


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting for what is queued on the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
