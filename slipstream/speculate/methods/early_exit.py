"""Early exit: the target's own first layers draft, with its head after them, and on its own keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles, read_integer
from slipstream.speculative_config import Needs, SpeculativeConfig

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.device.interface import Device
    from slipstream.models.decoder import Decoder
    from slipstream.speculate.speculator import MakeSpeculator

EXIT_LAYER = "exit_layer"
_MAX_LAYERS = 1 << 12


class EarlyExit(DraftMethod):
    name = "early_exit"
    needs = Needs(default_drafts=3, slots_per_draft=1)
    keys = (EXIT_LAYER,)  # how many layers draft

    def read_model(self, given: Any) -> None:
        if given is not None:
            raise ConfigError(
                f"{self.name} drafts with layers of the target itself and takes no model; leave out {given!r}"
            )

    def read_settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {EXIT_LAYER: 0 if given.get(EXIT_LAYER) is None else read_integer(given, EXIT_LAYER, 1, _MAX_LAYERS)}

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        from slipstream.models.registry import architecture_of

        model = architecture_of(target.hf_config).read_config(target.hf_config)
        # Layers that were not trained for it say nothing useful before the last few.
        num_layers = config.settings[EXIT_LAYER] or min(-(-3 * model.num_layers // 4), model.num_layers - 1)
        if not 0 < num_layers < model.num_layers:
            raise ConfigError(
                f"{EXIT_LAYER} {num_layers} must be at least 1 and below the target's {model.num_layers} layers"
            )
        for spec in model.cache_specs:
            if spec.drafter_refusal:
                raise ConfigError(f"{self.name} cannot draft with this target: it {spec.drafter_refusal}")
        return EarlyExitDrafter(num_layers)


@dataclass(frozen=True)
class EarlyExitDrafter:
    num_layers: int
    model: None = None  # no network beside the target's

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        from slipstream.speculate.early_exit import EarlyExitSpeculator

        if target.state is not None:
            raise ConfigError("early_exit cannot draft with this target: its inputs are prepared for its own steps")
        return lambda rows, caches: EarlyExitSpeculator(config, device, (target, self.num_layers), caches, rows)
