"""MTP: layers of the target's own checkpoint draft, each for one position ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.errors import ConfigError
from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles
from slipstream.speculate.methods.heads import HEAD_NEEDS
from slipstream.speculative_config import SpeculativeConfig


class Mtp(DraftMethod):
    name = "mtp"
    needs = replace(HEAD_NEEDS, default_drafts=3)

    def read_model(self, given: Any) -> None:
        if given is not None:
            raise ConfigError(f"mtp drafts with layers of the target itself and takes no model; leave out {given!r}")

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        from slipstream.speculate.open_head import open_head, read_own_layers

        if target.checkpoint is None:
            raise ConfigError("mtp drafts with layers of the target's checkpoint; a bare shape has none")
        return open_head(read_own_layers(target.checkpoint, target, "mtp"), target)
