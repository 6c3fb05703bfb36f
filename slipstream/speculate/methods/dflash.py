"""DFlash: layers trained for this target draft a block of tokens in one pass over its hidden states."""

from __future__ import annotations

from dataclasses import replace

from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles
from slipstream.speculate.methods.heads import HEAD_NEEDS
from slipstream.speculative_config import SpeculativeConfig


class DFlash(DraftMethod):
    name = "dflash"
    needs = replace(
        HEAD_NEEDS,
        default_drafts=15,
        extra_slots=1,  # a block begins with the newest token
        looks_ahead=False,
        in_one_pass=True,
        is_causal=False,
        taps=5,
    )

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        from slipstream.speculate.open_block_head import open_block_head
        from slipstream.speculate.open_head import read_trained_head

        assert config.model is not None
        return open_block_head(config, read_trained_head(config.model, target, "dflash"), target)
