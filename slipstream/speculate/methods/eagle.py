"""EAGLE: a small head, trained for this target, reads the hidden states after the target's final norm."""

from __future__ import annotations

from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles
from slipstream.speculate.methods.heads import HEAD_NEEDS
from slipstream.speculative_config import SpeculativeConfig


class Eagle(DraftMethod):
    name = "eagle"
    needs = HEAD_NEEDS

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        from slipstream.speculate.open_head import open_head, read_trained_head

        assert config.model is not None
        return open_head(read_trained_head(config.model, target, "eagle"), target)
