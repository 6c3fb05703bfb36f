"""What a user may say about training a head. Imports no torch: the command line shows these as options."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.errors import ConfigError

FORMATS = ("eagle3", "speculators")
# What the generated texts depend on; a file of them serves every training that agrees in these.
_OF_DATA = ("model", "prompts", "sequences", "max_len", "seed", "dtype")
# Where and how the result is written changes nothing in it.
_FREE = ("out", "format", "resume", "device", "checkpoint_every")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainSettings:
    """Options of ``slipstream train eagle3``."""

    model: str = _option("smollm2-135m", "Target: a folder, a .gguf file, a hub id or an alias (`slipstream models`).")
    out: str = _option("", "Folder for the head. Data and checkpoint are kept in its subfolder `training`.")
    format: str = _option("eagle3", "How the head is written: eagle3 or speculators.")
    prompts: str | None = _option(
        None, 'Prompts to answer besides the target\'s own: a line each, or JSONL with "prompt" or "turns".'
    )
    sequences: int = _option(8192, "How many texts the target writes.")
    max_len: int = _option(1024, "Longest text, prompt and answer, in tokens.")
    draft_vocab: int = _option(16000, "Tokens that can be drafted: the most frequent ones of the texts.")
    draft_steps: int = _option(6, "Draft steps that are trained one after another (EAGLE-3's training-time test).")
    steps: int | None = _option(None, "Steps of the optimiser; 2000 if --minutes is not given either.")
    minutes: float | None = _option(
        None, "Most minutes of training, data not counted; the learning rate falls with the time."
    )
    batch_tokens: int = _option(16384, "Tokens of one step, padding included.")
    lr: float = _option(1e-3, "Highest learning rate; it rises over the first 4 percent, then falls as a cosine.")
    checkpoint_every: int = _option(200, "Steps between checkpoints; held-out acceptance is measured with each.")
    seed: int = _option(0, "Seed of texts, weights and order.")
    resume: bool = _option(True, "Go on from the checkpoint in --out, if there is one.")
    device: str = _option("auto", "Device to run on: auto, cuda or cpu.")
    dtype: str = _option("auto", "Data type of the target, and of the head's file: auto, float32, bfloat16, float16.")

    def __post_init__(self) -> None:
        if not self.out:
            raise ConfigError("--out is missing; name the folder the head is to be written to")
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
        """None: as many as the minutes allow."""
        return 2000 if self.steps is None and self.minutes is None else self.steps

    def of_data(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_DATA}

    def of_training(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _FREE}


def check_same(kept: dict[str, Any], now: dict[str, Any], path: object) -> None:
    """Refuse to go on with what was made under other settings, and say which."""
    for name, value in now.items():
        if kept.get(name) != value:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{path} was made with {option} {kept.get(name)}, now it is {value}; use the same settings, another "
                "--out, or delete the file"
            )
