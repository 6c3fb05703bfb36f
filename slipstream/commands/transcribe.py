"""``slipstream transcribe``: sound files to text, JSON or subtitles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.commands.session import open_model
from slipstream.config import EngineOptions
from slipstream.errors import ConfigError, RequestError, nearest
from slipstream.transcription.options import TranscriptionOptions
from slipstream.transcription.result import Transcription
from slipstream.transcription.writers import SUFFIXES, WRITERS

_WITHOUT_TIMES = ("text", "json")
_REQUESTS_AT_ONCE = 8  # windows and files in the engine, unless --max-num-seqs says otherwise


@dataclass(frozen=True)
class TranscriptOutput:
    format: str = "text"
    folder: Path | None = None  # a file for each sound; standard output if None

    def __post_init__(self) -> None:
        if self.format not in WRITERS:
            hint = nearest(self.format, WRITERS) or f"; use {', '.join(WRITERS)}"
            raise ConfigError(f"--format {self.format} is unknown{hint}")


def run(files: Sequence[Path], options: TranscriptionOptions, engine: EngineOptions, output: TranscriptOutput) -> int:
    for file in files:  # before a model is loaded
        if not file.is_file():
            raise RequestError(f"there is no sound file at {file}; check the path")
    if options.word_timestamps and output.format in _WITHOUT_TIMES:
        raise RequestError(f"--format {output.format} has no times; --word-timestamps needs verbose_json, srt or vtt")
    targets = _choose_targets(files, output)
    if engine.max_num_seqs is None:
        engine = replace(engine, max_num_seqs=_REQUESTS_AT_ONCE if options.batched or len(files) > 1 else 1)
    with open_model(engine) as llm:
        results = llm.transcribe(list(files), options, progress=sys.stderr.isatty())
    for result, target in zip(results, targets, strict=True):
        _write(result, target, output)
    return 0


def _choose_targets(files: Sequence[Path], output: TranscriptOutput) -> list[Path | None]:
    """Where each transcript goes. Two sounds must not have one file."""
    if output.folder is None:
        return [None] * len(files)
    output.folder.mkdir(parents=True, exist_ok=True)
    targets = [output.folder / f"{file.stem}{SUFFIXES[output.format]}" for file in files]
    for i, target in enumerate(targets):
        if target in targets[:i]:
            raise RequestError(f"{files[targets.index(target)]} and {files[i]} would both be written to {target}")
    return list(targets)


def _write(result: Transcription, target: Path | None, output: TranscriptOutput) -> None:
    content = WRITERS[output.format](result)
    if target is None:
        sys.stdout.write(content if content.endswith("\n") or not content else f"{content}\n")
        sys.stdout.flush()
        return
    target.write_text(content, encoding="utf-8")
    sys.stderr.write(f"{target}\n")
