"""EAGLE-3: a small head, trained for this target, reads the hidden states of a few of the target's layers."""

from __future__ import annotations

from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles
from slipstream.speculate.methods.heads import HEAD_NEEDS
from slipstream.speculative_config import SpeculativeConfig


class Eagle3(DraftMethod):
    name = "eagle3"
    needs = HEAD_NEEDS

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        from slipstream.speculate.open_head import open_head, read_trained_head

        assert config.model is not None
        return open_head(read_trained_head(config.model, target, "eagle3"), target)
