"""The settings of training a head. Imports no torch: the command line shows them as options."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slipstream.config import option
from slipstream.errors import ConfigError

FORMATS = ("eagle3", "speculators")
# What the generated texts depend on; their file can be reused by trainings that agree in these.
_OF_DATA = ("model", "prompts", "sequences", "max_len", "seed", "dtype")
# These do not change the result, only where and how it is written.
_FREE = ("out", "format", "resume", "device", "checkpoint_every")


@dataclass(frozen=True)
class TrainSettings:
    """Options of ``slipstream train eagle3``."""

    model: str = option("smollm2-135m", "Target: a folder, a .gguf file, a hub id or an alias (`slipstream models`).")
    out: str = option("", "Folder for the head. Data and checkpoint are kept in its subfolder `training`.")
    format: str = option("eagle3", "File format of the head: eagle3 or speculators.")
    prompts: str | None = option(
        None, 'Prompts to answer besides the target\'s own: one per line, or JSONL with "prompt" or "turns".'
    )
    sequences: int = option(8192, "Number of texts that the target generates.")
    max_len: int = option(1024, "Maximum length of prompt and answer, in tokens.")
    draft_vocab: int = option(16000, "Size of the draft vocabulary: the most frequent tokens of the texts.")
    draft_steps: int = option(6, "Draft steps unrolled in training (EAGLE-3's training-time test).")
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
        if self.format not in FORMATS:
            raise ConfigError(f"--format must be {' or '.join(FORMATS)}, not '{self.format}'")
        if self.device not in ("auto", "cuda", "cpu"):
            raise ConfigError(f"--device must be auto, cuda or cpu, not '{self.device}'")
        limits = {"sequences": 16, "max_len": 32, "draft_vocab": 16, "draft_steps": 1, "checkpoint_every": 1, "seed": 0}
        for name, low in limits.items():
            self._check_least(name, getattr(self, name), low)
        self._check_least("batch_tokens", self.batch_tokens, self.max_len)
        if self.steps is not None:
            self._check_least("steps", self.steps, 1)
        for name in ("lr", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name} must be above 0, not {value}")
        if self.draft_steps > 16:
            raise ConfigError(f"--draft-steps must be at most 16, not {self.draft_steps}")

    def _check_least(self, name: str, value: int, low: int) -> None:
        if value < low:
            why = " (--max-len)" if name == "batch_tokens" else ""
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}{why}, not {value}")

    @property
    def max_steps(self) -> int | None:
        """None if only --minutes limits the training."""
        return 2000 if self.steps is None and self.minutes is None else self.steps

    def data_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_DATA}

    def training_settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _FREE}


def check_same(kept: dict[str, Any], now: dict[str, Any], path: object) -> None:
    """Raise an error that names the setting in which a file of an earlier run differs."""
    for name, value in now.items():
        if kept.get(name) != value:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{path} was made with {option} {kept.get(name)}, now it is {value}; use the same settings, another "
                "--out, or delete the file"
            )
