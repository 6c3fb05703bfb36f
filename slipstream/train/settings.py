"""The settings of training a head. Imports no torch: the command line shows them as options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from slipstream.config import option
from slipstream.errors import ConfigError

FORMATS = ("eagle3", "speculators")
BLOCK_FORMATS = ("dflash", "speculators")
# What the generated texts depend on; their file can be reused by trainings that agree in these.
_OF_DATA = ("model", "prompts", "sequences", "max_len", "seed", "dtype")
# These do not change the result, only where and how it is written.
_FREE = ("out", "format", "resume", "device", "checkpoint_every")


@dataclass(frozen=True)
class CommonSettings(ABC):
    """Options of every training."""

    formats: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[dict[str, int]] = {"sequences": 16, "max_len": 32, "checkpoint_every": 1, "seed": 0}

    model: str = option("smollm2-135m", "Target: a folder, a .gguf file, a hub id or an alias (`slipstream models`).")
    out: str = option("", "Folder for the head. Data and checkpoint are kept in its subfolder `training`.")
    format: str = option("", "File format of the head.")
    prompts: str | None = option(
        None, 'Prompts to answer besides the target\'s own: one per line, or JSONL with "prompt" or "turns".'
    )
    sequences: int = option(8192, "Number of texts that the target generates.")
    max_len: int = option(1024, "Maximum length of prompt and answer, in tokens.")
    steps: int | None = option(None, "Optimiser steps; 2000 if --minutes is not given either.")
    minutes: float | None = option(
        None, "Maximum minutes of training, without data; the learning rate follows the time."
    )
    batch_tokens: int = option(16384, "Tokens per step, padding included.")
    lr: float = option(1e-3, "Highest learning rate; linear warm-up over the first 4 percent, then cosine decay.")
    checkpoint_every: int = option(200, "Steps between checkpoints; held-out acceptance is measured with each.")
    seed: int = option(0, "Seed of texts, initial weights and order.")
    resume: bool = option(True, "Resume from the checkpoint in --out, if there is one.")
    device: str = option("auto", "Device to run on: auto, cuda or cpu.")
    dtype: str = option("auto", "Data type of the target, and of the head's file: auto, float32, bfloat16, float16.")

    def __post_init__(self) -> None:
        if not self.out:
            raise ConfigError("--out is missing; name the folder to write the head to")
        if self.format not in self.formats:
            raise ConfigError(f"--format must be {' or '.join(self.formats)}, not '{self.format}'")
        if self.device not in ("auto", "cuda", "cpu"):
            raise ConfigError(f"--device must be auto, cuda or cpu, not '{self.device}'")
        for name, low in self.limits.items():
            self._check_least(name, getattr(self, name), low)
        self._check_least("batch_tokens", self.batch_tokens, self.max_len)
        if self.steps is not None:
            self._check_least("steps", self.steps, 1)
        for name in ("lr", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name} must be above 0, not {value}")

    def _check_least(self, name: str, value: int, low: int) -> None:
        if value < low:
            why = " (--max-len)" if name == "batch_tokens" else ""
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}{why}, not {value}")

    @property
    @abstractmethod
    def num_drafts(self) -> int:
        """Drafts of a step that the head is trained for."""

    @property
    def max_steps(self) -> int | None:
        """None if only --minutes limits the training."""
        return 2000 if self.steps is None and self.minutes is None else self.steps

    def data_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_DATA}

    def training_settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _FREE}


@dataclass(frozen=True)
class TrainSettings(CommonSettings):
    """Options of ``slipstream train eagle3``."""

    formats: ClassVar[tuple[str, ...]] = FORMATS
    limits: ClassVar[dict[str, int]] = {**CommonSettings.limits, "draft_vocab": 16, "draft_steps": 1}

    format: str = option("eagle3", "File format of the head: eagle3 or speculators.")
    draft_vocab: int = option(16000, "Size of the draft vocabulary: the most frequent tokens of the texts.")
    draft_steps: int = option(6, "Draft steps unrolled in training (EAGLE-3's training-time test).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_steps > 16:
            raise ConfigError(f"--draft-steps must be at most 16, not {self.draft_steps}")

    @property
    def num_drafts(self) -> int:
        return self.draft_steps


@dataclass(frozen=True)
class BlockSettings(CommonSettings):
    """Options of ``slipstream train dflash``."""

    formats: ClassVar[tuple[str, ...]] = BLOCK_FORMATS
    limits: ClassVar[dict[str, int]] = {**CommonSettings.limits, "layers": 1, "block_size": 2, "anchors": 1}

    format: str = option("dflash", "File format of the head: dflash or speculators.")
    layers: int = option(5, "Decoder layers of the head.")
    block_size: int = option(16, "Tokens of a block: the newest one and masks.")
    anchors: int = option(64, "Blocks that are trained in each text of a batch, drawn anew in every step.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size > 17:
            raise ConfigError(f"--block-size must be at most 17, not {self.block_size}: a step has up to 16 drafts")

    @property
    def num_drafts(self) -> int:
        return self.block_size - 1


def check_same(kept: dict[str, Any], now: dict[str, Any], path: object) -> None:
    """Raise an error that names the setting in which a file of an earlier run differs."""
    for name, value in now.items():
        if kept.get(name) != value:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{path} was made with {option} {kept.get(name)}, now it is {value}; use the same settings, another "
                "--out, or delete the file"
            )
