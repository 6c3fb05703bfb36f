"""Certain tokens: drafts only where a grammar allows nothing else, which every method's requests have as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles
from slipstream.speculative_config import Needs, SpeculativeConfig

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.device.interface import Device
    from slipstream.models.decoder import Decoder
    from slipstream.speculate.speculator import MakeSpeculator


class CertainTokens(DraftMethod):
    name = "certain_tokens"
    # A step proposes any number at the same cost: none.
    needs = Needs(default_drafts=3, is_certain=True, in_one_pass=True)

    def read_model(self, given: Any) -> None:
        if given is not None:
            raise ConfigError(f"{self.name} drafts what grammars leave no choice of; leave out the model {given!r}")

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        return CertainTokensDrafter()


@dataclass(frozen=True)
class CertainTokensDrafter:
    model: None = None

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        from slipstream.speculate.host_staged import HostStagedSpeculator

        return lambda _rows, _caches: HostStagedSpeculator(config, device)
