"""A training from start to finish, whatever the head: texts, target model, trainer, curves and card."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.config import ModelConfig, writable_folder
from slipstream.errors import ConfigError
from slipstream.models.load import open_decoder
from slipstream.models.registry import architecture_of
from slipstream.train.card import write_card
from slipstream.train.curves import draw_curves
from slipstream.train.data import Source, Texts
from slipstream.train.settings import CommonSettings
from slipstream.train.target import TargetModel, load_target
from slipstream.train.text_generation import OnCount
from slipstream.train.trainer import OnProgress, Progress, Stored, Trainable, Trainer, read_checkpoint

WORK_FOLDER = "training"


@dataclass(frozen=True)
class Report:
    """Callbacks for messages, progress of the texts, and progress of the training."""

    say: Callable[[str], None]
    on_texts: OnCount
    on_step: OnProgress


@dataclass(frozen=True)
class Session:
    """Everything that a training needs beside the head."""

    settings: CommonSettings
    report: Report
    out: Path
    checkpoint: Checkpoint
    target: ModelConfig
    target_model: TargetModel
    source: Source
    texts: Texts
    stored: Stored | None  # of an earlier run

    @property
    def work(self) -> Path:
        return self.out / WORK_FOLDER

    def train(self, head: Trainable) -> Progress:
        settings, report = self.settings, self.report
        trainer = Trainer(settings, self.target_model, head, self.texts, self.work / "checkpoint.safetensors")
        if self.stored is not None:
            trainer.restore(self.stored)
            report.say(f"resuming after step {trainer.progress.step}")
        trainer.fill_cache(report.on_texts)
        try:
            return trainer.run(report.on_step)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU's memory ran out: lower --batch-tokens (now {settings.batch_tokens}) or --max-len "
                f"({settings.max_len}); that changes the training, so use another --out"
            ) from error

    def write_about(self, method: str, name: str, num_parameters: int, progress: Progress, **more: Any) -> None:
        """Curves, and a card beside the head; ``name`` is the kind of head in both."""
        device, texts = self.target_model.device, self.texts
        about = {
            "method": method,
            "settings": self.settings.training_settings(),
            "format": self.settings.format,
            "texts": {"count": len(texts.lengths), "tokens": len(texts.token_ids), "seconds": self.source.seconds},
            **more,
            "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
            "num_parameters": num_parameters,
            "dtype": str(self.target_model.dtype).removeprefix("torch."),
            **vars(progress),
        }
        (self.work / "curves.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
        title = f"{name} head for {self.settings.model}"
        write_card(self.out, about, title)
        if (line := draw_curves(progress, self.out / "curves.png", title)) is not None:
            self.report.say(line)


def open_session(
    settings: CommonSettings, report: Report, taps_of: Callable[[ModelConfig], tuple[int, ...]]
) -> Session:
    """Files of an earlier run are checked before anything is computed; texts are generated where there are none."""
    out = writable_folder(Path(settings.out), "to --out", "folder")
    path = resolve_model(settings.model)
    checkpoint = open_decoder(path)
    target = architecture_of(checkpoint.config).read_config(checkpoint.config)
    taps = taps_of(target)
    if settings.max_len > target.max_position:
        raise ConfigError(f"--max-len {settings.max_len} is beyond the model's context of {target.max_position}")
    work = out / WORK_FOLDER
    work.mkdir(exist_ok=True)
    source, kept = Source(settings, work / "data.safetensors"), work / "checkpoint.safetensors"
    texts = source.read()
    stored = read_checkpoint(kept, settings) if settings.resume and kept.exists() else None
    if texts is None:
        texts = source.write(path, report.say, report.on_texts)
    target_model = load_target(path, checkpoint, taps, settings.device, settings.dtype)
    return Session(settings, report, out, checkpoint, target, target_model, source, texts, stored)
