"""A smaller model with the same vocabulary drafts: a second checkpoint, with its own keys."""

from __future__ import annotations

from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles
from slipstream.speculative_config import Needs, SpeculativeConfig


class SecondModel(DraftMethod):
    name = "draft_model"
    needs = Needs(default_drafts=5, own_keys=True, catches_up=True, goes_over_last=True, slots_per_draft=1)

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        from slipstream.speculate.open_draft_model import open_draft_model

        assert config.model is not None
        return open_draft_model(config.model, target)
