"""The declaration of a drafting method. Its file imports torch only when the method is opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from slipstream.errors import ConfigError
from slipstream.host_drafting import HostProposer, Rehearsal
from slipstream.speculative_config import Needs, SpeculativeConfig

if TYPE_CHECKING:
    from slipstream.checkpoints.checkpoint import Checkpoint
    from slipstream.config import DraftModel, EngineConfig
    from slipstream.device.interface import Device
    from slipstream.models.decoder import Decoder
    from slipstream.models.load import Placement
    from slipstream.speculate.speculator import MakeSpeculator
    from slipstream.text.tokenizer import Tokenizer


class TargetFiles(NamedTuple):
    """The target's files before any weight is read."""

    hf_config: dict[str, Any]
    checkpoint: Checkpoint | None  # None for a bare shape with random weights
    tokenizer: Tokenizer | None
    placement: Placement


class Drafter(Protocol):
    """An opened method, its weights not yet read."""

    @property
    def model(self) -> DraftModel | None:
        """Its network; None where it has none."""
        ...

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        """Read its weights; the target's are loaded, in the checkpoint's layout."""
        ...


class DraftMethod(ABC):
    name: ClassVar[str]
    needs: ClassVar[Needs]
    keys: ClassVar[Sequence[str]] = ()  # its own keys in speculative_config
    model_names: ClassVar[Sequence[str]] = ()  # model names that select it

    def read_model(self, given: Any) -> str | None:
        """The checkpoint of the drafter, from the user's options; refuses what does not fit."""
        return require_model(given, self.name)

    def read_settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values of all its own keys, from the user's options."""
        return {}

    @abstractmethod
    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        """Refuses what does not fit the target."""

    def rehearse(self, config: SpeculativeConfig, num_rows: int) -> Rehearsal | None:
        """Drafts rehearsed on the host while none is proposed; for methods whose drafts follow from the text."""
        return None

    def think_on_host(self, config: SpeculativeConfig) -> HostProposer | None:
        """For methods whose drafts the host stages."""
        return None


def require_model(given: Any, name: str) -> str:
    if not (isinstance(given, str) and given):
        raise ConfigError(f"{name} needs a model: name one as draft_model, or as model in speculative_config")
    return given


def read_integer(
    given: Mapping[str, Any], key: str, default: int, largest: int, names: Mapping[str, str] | None = None
) -> int:
    """``names`` has what the user calls a key, where that is not the key."""
    value = given.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise ConfigError(f"{(names or {}).get(key, key)} must be an integer from 1 to {largest}, not {value!r}")
    return value
