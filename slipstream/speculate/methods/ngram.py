"""N-gram drafts, from a request's own tokens: no network and no state, searched on the device after every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.host_drafting import Rehearsal
from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles, read_integer
from slipstream.speculative_config import Needs, SpeculativeConfig

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.device.interface import Device
    from slipstream.models.decoder import Decoder
    from slipstream.speculate.speculator import MakeSpeculator

MAX_MATCH = 32
_DEFAULT_MATCH = 5
MIN_KEY, MAX_KEY = "prompt_lookup_min", "prompt_lookup_max"


class Ngram(DraftMethod):
    name = "ngram"
    needs = Needs(default_drafts=7, from_text=True, is_certain=True)
    # Minimum and maximum number of last tokens that must have occurred together before.
    keys = (MIN_KEY, MAX_KEY)
    model_names = ("ngram", "[ngram]")  # vLLM's spelling as a model name

    def read_model(self, given: Any) -> None:
        if given is not None and given not in self.model_names:
            raise ConfigError(f"ngram drafts from a request's own tokens and takes no model; leave out {given!r}")

    def read_settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        min_match = read_integer(given, MIN_KEY, 1, MAX_MATCH)
        max_match = read_integer(given, MAX_KEY, max(_DEFAULT_MATCH, min_match), MAX_MATCH)
        if min_match > max_match:
            raise ConfigError(f"{MIN_KEY} {min_match} is above {MAX_KEY} {max_match}; lower it")
        return {MIN_KEY: min_match, MAX_KEY: max_match}

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        return NgramDrafter()

    def rehearse(self, config: SpeculativeConfig, num_rows: int) -> Rehearsal:
        from slipstream.speculate.ngram_rehearsal import NgramRehearsal

        return NgramRehearsal(config, num_rows)


@dataclass(frozen=True)
class NgramDrafter:
    model: None = None

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        from slipstream.speculate.ngram import NgramSpeculator

        speculative = config.speculative
        assert speculative is not None
        return lambda rows, _: NgramSpeculator(speculative, rows)
