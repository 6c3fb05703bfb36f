"""Training an EAGLE-3 head from beginning to end: texts, teacher, vocabulary, loop, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.config import ModelConfig, writable_folder
from slipstream.errors import ConfigError
from slipstream.models.hub import resolve_model
from slipstream.models.load import open_decoder
from slipstream.models.registry import architecture_of
from slipstream.models.weights import Checkpoint
from slipstream.train.author import Advance
from slipstream.train.card import write_card
from slipstream.train.curves import draw_curves
from slipstream.train.data import Source, Texts
from slipstream.train.export import default_taps, plan_head, write_head
from slipstream.train.head import TrainableHead
from slipstream.train.loop import OnProgress, Progress, Trainer, read_checkpoint
from slipstream.train.settings import TrainSettings
from slipstream.train.teacher import Teacher, load_teacher, padded_length
from slipstream.train.vocabulary import DraftVocabulary, choose_vocabulary, coverage

WORK_FOLDER = "training"


@dataclass(frozen=True)
class Report:
    """Where to say what: lines, how far the texts are, how far the training is."""

    say: Callable[[str], None]
    on_texts: Advance
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
    # What was kept is checked before anything is computed.
    source, kept = Source(settings, work / "data.safetensors"), work / "checkpoint.safetensors"
    texts = source.read()
    stored = read_checkpoint(kept, settings) if settings.resume and kept.exists() else None
    if texts is None:
        texts = source.write(path, report.say, report.on_texts)
    teacher = load_teacher(path, checkpoint, taps, settings.device, settings.dtype)
    vocabulary, covered = _vocabulary(settings, checkpoint, texts, target, report)
    head = make_head(settings, teacher, vocabulary)
    trainer = Trainer(settings, teacher, head, texts, kept)
    if stored is not None:
        trainer.restore(stored)
        report.say(f"going on after step {trainer.progress.step}")
    trainer.keep_lessons(report.on_texts)
    try:
        progress = trainer.run(report.on_step)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU's memory ran out: lower --batch-tokens (now {settings.batch_tokens}) or --max-len "
            f"({settings.max_len}); that is another training, so use another --out"
        ) from error
    write_head(
        out,
        head,
        vocabulary,
        target,
        format=settings.format,
        dtype=teacher.dtype,
        verifier=settings.model,
        num_drafts=settings.draft_steps,
    )
    place = teacher.device
    about = {
        "settings": settings.of_training(),
        "format": settings.format,
        "texts": {"count": len(texts.lengths), "tokens": len(texts.token_ids), "seconds": source.seconds},
        "vocabulary": {"size": len(vocabulary.target_ids), "coverage": covered},
        "hardware": torch.cuda.get_device_name(place) if place.type == "cuda" else "a CPU",
        "num_parameters": sum(parameter.numel() for parameter in head.parameters()),
        "dtype": str(teacher.dtype).removeprefix("torch."),
        **vars(progress),
    }
    (work / "curves.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    write_card(out, about)
    if (line := draw_curves(progress, out / "curves.png", f"EAGLE-3 head for {settings.model}")) is not None:
        report.say(line)
    return progress


def make_head(settings: TrainSettings, teacher: Teacher, vocabulary: DraftVocabulary) -> TrainableHead:
    """With its first weights, in float32 at least."""
    plan = plan_head(teacher.config, len(vocabulary.target_ids), teacher.dtype)
    max_position = padded_length(settings.max_len) + settings.draft_steps
    head = TrainableHead(plan, teacher.embedding, vocabulary.target_ids.to(teacher.device), max_position)
    head = head.to(teacher.device)
    for module in head.modules():  # the embedding stays as the target has it
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(torch.promote_types(teacher.dtype, torch.float32))
    head.begin_with(teacher.head, teacher.model.model.norm.weight, teacher.last_layer, settings.seed)
    return head


def _vocabulary(
    settings: TrainSettings, checkpoint: Checkpoint, texts: Texts, target: ModelConfig, report: Report
) -> tuple[DraftVocabulary, float]:
    """And the share of held-out texts that it covers."""
    eos = checkpoint.tokenizer().eos_token_id
    learnt = torch.cat([texts.tokens_of(idx) for idx in texts.where(held_out=False).tolist()])
    always = () if eos is None else (eos,)
    vocabulary = choose_vocabulary(learnt, target.vocab_size, settings.draft_vocab, always)
    unseen = torch.cat([texts.tokens_of(idx) for idx in texts.where(held_out=True).tolist()])
    covered = coverage(vocabulary, unseen)
    report.say(
        f"{len(texts.lengths):,} texts, {len(texts.token_ids):,} tokens; the {len(vocabulary.target_ids):,} most "
        f"frequent are {covered:.1%} of held-out texts"
    )
    return vocabulary, covered
