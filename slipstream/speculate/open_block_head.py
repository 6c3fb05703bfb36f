"""Heads that draft a block in one pass, opened and checked before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.attention.choice import open_caches
from slipstream.config import DraftModel, EngineConfig
from slipstream.device.interface import Device
from slipstream.errors import ConfigError
from slipstream.models.decoder import Decoder
from slipstream.models.heads.dflash import DFlashHead
from slipstream.speculate.dflash import DFlashSpeculator
from slipstream.speculate.method import TargetFiles
from slipstream.speculate.open_head import HeadFiles, describe_head, load_head
from slipstream.speculate.speculator import MakeSpeculator
from slipstream.speculative_config import SpeculativeConfig


@dataclass(frozen=True)
class BlockDrafter:
    model: DraftModel
    files: HeadFiles

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        head = load_head(self.files, config, device, target)
        assert isinstance(head, DFlashHead)
        caches = open_caches(config, self.model.config, device, for_drafter=True)
        return lambda rows, _: DFlashSpeculator(config, device, head, caches, rows)


def open_block_head(config: SpeculativeConfig, files: HeadFiles, target: TargetFiles) -> BlockDrafter:
    block = files.plan.block
    assert block is not None
    if config.num_drafts > block.max_drafts and not config.adaptive:
        raise ConfigError(
            f"the head drafts {block.max_drafts} tokens at most, not {config.num_drafts}; lower num_speculative_tokens"
        )
    return BlockDrafter(describe_head(files, target)._replace(max_drafts=block.max_drafts), files)
