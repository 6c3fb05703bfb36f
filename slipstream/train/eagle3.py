"""Training an EAGLE-3 head from start to finish: texts, target model, draft vocabulary, trainer, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
from slipstream.train.export import default_taps, plan_head, write_head
from slipstream.train.head import TrainableHead
from slipstream.train.settings import TrainSettings
from slipstream.train.target import TargetModel, load_target, padded_length
from slipstream.train.text_generation import OnCount
from slipstream.train.trainer import OnProgress, Progress, Trainer, read_checkpoint
from slipstream.train.vocabulary import DraftVocabulary, choose_vocabulary, coverage

WORK_FOLDER = "training"


@dataclass(frozen=True)
class Report:
    """Callbacks for messages, progress of the texts, and progress of the training."""

    say: Callable[[str], None]
    on_texts: OnCount
    on_step: OnProgress


def train_eagle3(settings: TrainSettings, report: Report) -> Progress:
    out = writable_folder(Path(settings.out), "to --out", "folder")
    path = resolve_model(settings.model)
    checkpoint = open_decoder(path)
    target = architecture_of(checkpoint.config).read_config(checkpoint.config)
    taps = default_taps(target)
    if settings.max_len > target.max_position:
        raise ConfigError(f"--max-len {settings.max_len} is beyond the model's context of {target.max_position}")
    work = out / WORK_FOLDER
    work.mkdir(exist_ok=True)
    # Files of an earlier run are checked before anything is computed.
    source, kept = Source(settings, work / "data.safetensors"), work / "checkpoint.safetensors"
    texts = source.read()
    stored = read_checkpoint(kept, settings) if settings.resume and kept.exists() else None
    if texts is None:
        texts = source.write(path, report.say, report.on_texts)
    target_model = load_target(path, checkpoint, taps, settings.device, settings.dtype)
    vocabulary, covered = _vocabulary(settings, checkpoint, texts, target, report)
    head = make_head(settings, target_model, vocabulary)
    trainer = Trainer(settings, target_model, head, texts, kept)
    if stored is not None:
        trainer.restore(stored)
        report.say(f"resuming after step {trainer.progress.step}")
    trainer.fill_cache(report.on_texts)
    try:
        progress = trainer.run(report.on_step)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU's memory ran out: lower --batch-tokens (now {settings.batch_tokens}) or --max-len "
            f"({settings.max_len}); that changes the training, so use another --out"
        ) from error
    write_head(
        out,
        head,
        vocabulary,
        target,
        format=settings.format,
        dtype=target_model.dtype,
        verifier=settings.model,
        num_drafts=settings.draft_steps,
    )
    device = target_model.device
    about = {
        "settings": settings.training_settings(),
        "format": settings.format,
        "texts": {"count": len(texts.lengths), "tokens": len(texts.token_ids), "seconds": source.seconds},
        "vocabulary": {"size": len(vocabulary.target_ids), "coverage": covered},
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        "num_parameters": sum(parameter.numel() for parameter in head.parameters()),
        "dtype": str(target_model.dtype).removeprefix("torch."),
        **vars(progress),
    }
    (work / "curves.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    write_card(out, about)
    if (line := draw_curves(progress, out / "curves.png", f"EAGLE-3 head for {settings.model}")) is not None:
        report.say(line)
    return progress


def make_head(settings: TrainSettings, target_model: TargetModel, vocabulary: DraftVocabulary) -> TrainableHead:
    """The head with its initial weights, in float32 at least."""
    plan = plan_head(target_model.config, len(vocabulary.target_ids), target_model.dtype)
    max_position = padded_length(settings.max_len) + settings.draft_steps
    head = TrainableHead(plan, target_model.embedding, vocabulary.target_ids.to(target_model.device), max_position)
    head = head.to(target_model.device)
    for module in head.modules():  # the embedding keeps the target's type
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(torch.promote_types(target_model.dtype, torch.float32))
    head.initialise(target_model.head, target_model.model.model.norm.weight, target_model.last_layer, settings.seed)
    return head


def _vocabulary(
    settings: TrainSettings, checkpoint: Checkpoint, texts: Texts, target: ModelConfig, report: Report
) -> tuple[DraftVocabulary, float]:
    """The draft vocabulary, and the share of held-out tokens that it covers."""
    eos = checkpoint.tokenizer().eos_token_id
    trained = torch.cat([texts.tokens_of(idx) for idx in texts.where(held_out=False).tolist()])
    always = () if eos is None else (eos,)
    vocabulary = choose_vocabulary(trained, target.vocab_size, settings.draft_vocab, always)
    unseen = torch.cat([texts.tokens_of(idx) for idx in texts.where(held_out=True).tolist()])
    covered = coverage(vocabulary, unseen)
    report.say(
        f"{len(texts.lengths):,} texts, {len(texts.token_ids):,} tokens; the {len(vocabulary.target_ids):,} most "
        f"frequent are {covered:.1%} of held-out texts"
    )
    return vocabulary, covered
