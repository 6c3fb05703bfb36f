"""Drafters that the package does not know, from the smallest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.device.operation import TensorSpec, operation
from slipstream.errors import ConfigError
from slipstream.host_drafting import HostProposer
from slipstream.kernels.request_rows import RowState
from slipstream.models.decoder import Decoder
from slipstream.speculate.host_staged import HostStagedSpeculator
from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles, read_integer
from slipstream.speculate.speculator import DraftBatch, MakeSpeculator, NoSpeculator
from slipstream.speculative_config import Needs, SpeculativeConfig

# --- the last token, again ------------------------------------------------------------------------


class Repeat(DraftMethod):
    """Drafts the last token; with ``toy_period`` n, the last n in turns."""

    name = "toy_repeat"
    needs = Needs(default_drafts=3, max_drafts=5, is_certain=True)
    keys = ("toy_period",)

    def read_model(self, given: Any) -> None:
        if given is not None:
            raise ConfigError(f"{self.name} takes no model; leave out {given!r}")

    def read_settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"toy_period": read_integer(given, "toy_period", 1, 4)}

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        return RepeatDrafter()


@dataclass(frozen=True)
class RepeatDrafter:
    model: None = None

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        assert config.speculative is not None
        period = config.speculative.settings["toy_period"]
        return lambda rows, _: RepeatSpeculator(period, rows)


class RepeatSpeculator(NoSpeculator):
    def __init__(self, period: int, rows: RowState) -> None:
        self._period, self._rows = period, rows

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        return toy_repeat(batch.rows, self._rows.token_ids, self._rows.num_tokens, self._period, batch.num_drafts)


@operation(lambda batch_rows, count: TensorSpec((batch_rows.shape[0], count), torch.int32))
def toy_repeat(
    batch_rows: Tensor,  # [padded_reqs] int32
    token_ids: Tensor,  # [num_rows, max_len] int32
    num_tokens: Tensor,  # [num_rows] int32
    period: int,
    count: int,
) -> Tensor:  # [padded_reqs, count] int32
    rows = batch_rows.long()
    before = period - torch.arange(count) % period
    return token_ids[rows.unsqueeze(1), (num_tokens[rows].unsqueeze(1) - before).clamp(min=0).long()]


# --- the same, thought out on the host --------------------------------------------------------------


class HostRepeat(DraftMethod):
    name = "toy_host"
    needs = Needs(default_drafts=3, is_certain=True, host_drafts=True)

    def read_model(self, given: Any) -> None:
        if given is not None:
            raise ConfigError(f"{self.name} takes no model; leave out {given!r}")

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        return HostRepeatDrafter()

    def think_on_host(self, config: SpeculativeConfig) -> HostProposer:
        return Echo()


@dataclass(frozen=True)
class HostRepeatDrafter:
    model: None = None

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        return lambda _rows, _caches: HostStagedSpeculator(config, device)


class Echo:
    def propose(self, request_id: str, token_ids: Sequence[int], count: int) -> Sequence[int]:
        return [token_ids[-1]] * count
