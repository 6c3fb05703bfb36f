"""The encoder's part of a step: once for each request that is admitted, before the step's tokens are computed.

Inputs travel through a ring of pinned memory; the host waits for nothing. Passes are launched, never part of a graph,
and one after the other: so a request's output does not depend on the company in which it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.attention.groups import CacheGroups
from slipstream.config import EngineConfig
from slipstream.device.interface import Device, Event
from slipstream.kernels.request_rows import EncoderPages
from slipstream.models.source_encoder import SourceEncoder
from slipstream.plan import EncoderRun
from slipstream.runner.rings import Ring

# An input, and the pages on the device for what a network keeps of the output.
Encode = Callable[[Tensor, Tensor], None]


@dataclass(slots=True)
class _Slot:
    pinned: Tensor  # [capacity] float32
    on_device: Tensor  # the same
    event: Event


class EncoderStep:
    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        encoder: SourceEncoder,
        caches: CacheGroups,
        rows: EncoderPages,
        encode_for_drafter: Encode,
    ) -> None:
        shape = config.model.source_encoder
        assert shape is not None
        self._device, self._encoder, self._caches, self._rows = device, encoder, caches, rows
        self._encode_for_drafter = encode_for_drafter
        self._dtype = getattr(torch, config.dtype)
        # A step encodes one request, or as many as have no more entries together than the step may have tokens.
        most_entries = max(shape.max_entries, config.scheduler.max_num_batched_tokens)
        size = (most_entries * shape.frames_per_entry * shape.num_bins,)
        self.ring = Ring(
            [
                _Slot(
                    device.pinned_empty(size, torch.float32),
                    torch.zeros(size, dtype=torch.float32, device=device.torch_device),
                    device.event(),
                )
                for _ in range(config.steps_in_flight + 1)
            ]
        )

    def run(self, runs: Sequence[EncoderRun]) -> None:
        """The rows of the requests, which name their pages, are on the device."""
        slot, begin = self.ring.acquire(), 0
        for run in runs:
            features = run.encoder.features
            part = slice(begin, begin + features.size)
            slot.pinned[part].numpy()[:] = features.reshape(-1)
            begin = part.stop
        self._device.copy_async(slot.on_device[:begin], slot.pinned[:begin])
        slot.event.record(self._device.compute_stream)
        begin = 0
        for run in runs:
            shape = run.encoder.features.shape
            end = begin + run.encoder.features.size
            given, page_ids = slot.on_device[begin:end].view(shape).to(self._dtype), self._rows.page_table[run.row]
            for layer in self._encoder.encode(given):
                self._caches.store_encoded(*layer, page_ids)
            self._encode_for_drafter(given, page_ids)
            begin = end
