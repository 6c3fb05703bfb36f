"""For drafts that come from the host: a step proposes nothing on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.speculate.speculator import DraftBatch, NoSpeculator


class HostStagedSpeculator(NoSpeculator):
    def __init__(self, config: EngineConfig, device: Device) -> None:
        size = (config.scheduler.max_num_seqs, config.num_drafts)
        self._none = torch.full(size, -1, dtype=torch.int32, device=device.torch_device)

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        return self._none[: batch.padded_reqs, : batch.num_drafts]
