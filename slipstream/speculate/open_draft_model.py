"""A second checkpoint as drafter: opened and checked before any weight is read, built once the target is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.attention.choice import open_caches
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.config import DraftModel, EngineConfig, ModelConfig
from slipstream.device.interface import Device
from slipstream.errors import ConfigError
from slipstream.models.decoder import Decoder
from slipstream.models.load import build_model, load_weights, measure_model, open_decoder
from slipstream.models.registry import Architecture, architecture_of
from slipstream.speculate.draft_model import DraftModelSpeculator
from slipstream.speculate.method import TargetFiles
from slipstream.speculate.speculator import MakeSpeculator


@dataclass(frozen=True)
class DraftModelDrafter:
    model: DraftModel
    architecture: Architecture
    checkpoint: Checkpoint

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        network = build_model(self.architecture, config, device.torch_device, self.model.config)
        load_weights(network, self.checkpoint.tensors())
        network.finish_weights()
        caches = open_caches(config, self.model.config, device, for_drafter=True)
        return lambda rows, _: DraftModelSpeculator(config, device, network, caches, rows)


def open_draft_model(model: str, target: TargetFiles) -> DraftModelDrafter:
    draft = open_decoder(resolve_model(model), target.placement.keep_blocks)
    if target.tokenizer is None:
        sizes = [architecture_of(config).read_config(config).vocab_size for config in (target.hf_config, draft.config)]
        same = sizes[0] == sizes[1]
    else:
        other = draft.tokenizer()
        sizes, same = [target.tokenizer.vocab_size, other.vocab_size], target.tokenizer.agrees_with(other)
    if not same:
        raise ConfigError(
            f"the draft model {model} has another vocabulary than the target ({sizes[1]} tokens, "
            f"{sizes[0]} there): a draft would mean another text; use a draft model of the same family"
        )
    architecture = architecture_of(draft.config)
    config = architecture.read_config(draft.config)
    _check_encoders(model, config, architecture_of(target.hf_config).read_config(target.hf_config))
    for spec in config.cache_specs:
        if spec.drafter_refusal:
            raise ConfigError(
                f"the draft model {model} {spec.drafter_refusal}; use a draft model with attention alone, or a method "
                "that needs no model"
            )
    size = measure_model(architecture, config, target.placement)
    return DraftModelDrafter(DraftModel(config, size), architecture, draft)


def _check_encoders(model: str, draft: ModelConfig, target: ModelConfig) -> None:
    """Both read a request's encoder input, and what they make of it is in the same pages."""
    if draft.source_encoder is None:
        return
    if target.source_encoder is None:
        raise ConfigError(f"the draft model {model} has an encoder, for which requests of the target bring no input")
    own, other = ((e.num_bins, e.max_frames, e.frames_per_entry) for e in (draft.source_encoder, target.source_encoder))
    if own != other:
        raise ConfigError(
            f"the encoder of the draft model {model} reads {own[0]} bins and {own[1]} frames, the target's {other[0]} "
            f"and {other[1]}; use a draft model that reads the same input"
        )
