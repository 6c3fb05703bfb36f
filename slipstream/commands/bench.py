"""``slipstream bench``: decode speed of a model, or of a shape with random weights, for several batch sizes."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from slipstream.checkpoints.hub import with_shipped_head
from slipstream.commands.measure import BatchRun, decode_rate, run_batch
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.commands.session import warn_if_synthetic
from slipstream.config import EngineConfig, EngineOptions
from slipstream.engine.find_models import resolve_models
from slipstream.errors import ConfigError
from slipstream.models.shapes import shape_config
from slipstream.output import SYNTHETIC_NOTICE, DraftStats
from slipstream.speculate.options import read_speculation
from slipstream.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from slipstream.checkpoints.checkpoint import Checkpoint
    from slipstream.engine.client import EngineClient
    from slipstream.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Workload:
    batches: tuple[int, ...]
    prompt_len: int
    output_len: int
    repeat: int

    @classmethod
    def parse(cls, batch: str, *, prompt_len: int, output_len: int, repeat: int) -> Workload:
        """Check the command line's values; ``batch`` is a list such as ``1,8,32``."""
        sizes = [part.strip() for part in batch.split(",")]
        if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
            raise ConfigError(f"--batch must be positive numbers separated by commas, such as 1,8,32, not '{batch}'")
        for name, value, low in (("prompt-len", prompt_len, 1), ("output-len", output_len, 3), ("repeat", repeat, 1)):
            if value < low:
                raise ConfigError(f"--{name} must be at least {low}, not {value}")
        return cls(tuple(dict.fromkeys(int(size) for size in sizes)), prompt_len, output_len, repeat)

    @property
    def num_tokens(self) -> int:
        """Length of one request, prompt and output."""
        return self.prompt_len + self.output_len

    def fit(self, options: EngineOptions) -> EngineOptions:
        """Limit the engine to this workload, except where the user set options.

        The prefix cache is off: every run has the same prompts, and each has to be computed.
        """
        options = replace(options, enable_prefix_caching=False)
        if options.max_model_len is None:
            options = replace(options, max_model_len=self.num_tokens)
        if options.max_num_seqs is None:
            options = replace(options, max_num_seqs=max(self.batches))
        return options

    def check(self, config: EngineConfig) -> None:
        """Refuse a workload whose batches would wait for room, since their rate would be that of a smaller batch."""
        scheduler, cache, largest = config.scheduler, config.cache, max(self.batches)
        self.check_length("max_model_len", scheduler.max_model_len)
        if largest > scheduler.max_num_seqs:
            raise ConfigError(f"--batch {largest} is above max_num_seqs {scheduler.max_num_seqs}; raise --max-num-seqs")
        pages = largest * -(-self.num_tokens // cache.page_size)
        if pages > cache.num_pages - 1:
            raise ConfigError(
                f"--batch {largest} needs {pages} KV cache pages, there are {cache.num_pages - 1}; lower --batch or "
                f"give --num-gpu-blocks-override {pages}"
            )

    def check_length(self, name: str, limit: int) -> None:
        if self.num_tokens > limit:
            raise ConfigError(
                f"--prompt-len and --output-len make {self.num_tokens} tokens, {name} is {limit}; lower them"
            )


def run(
    options: EngineOptions,
    workload: Workload,
    *,
    model: str | None,
    shape: str | None,
    output_dir: Path,
    as_json: bool,
) -> int:
    if model is not None and shape is not None:
        raise ConfigError("--model and --shape are two things to measure; give one of them")
    options = options if model is None else replace(options, model=model)
    if shape is None:
        options = with_shipped_head(options, by_default=False)
    warn_if_synthetic(options)
    options = workload.fit(options)
    name, speculative = shape or case_name(options.model), read_speculation(options)
    if shape is not None:
        check_room(options, workload, shape_config(shape), None, None, name)
    else:
        options = resolve_models(options)  # shows its own progress
        check_room(options, workload, *_open(options, speculative), name)
    case = name if speculative is None else f"{name}+{speculative.method}"
    prepare_folder(output_dir)
    rows, device = _measure_all(options, workload, shape, case)
    results = collect_results(rows, device=device)
    path = write_results(results, output_dir, case)
    if as_json:
        sys.stdout.write(results.as_json())
    else:
        Console().print(_table(results.rows, results.hardware))
    _notes().print(f"written to {path}", soft_wrap=True, highlight=False)
    return 0


def case_name(model: str) -> str:
    """The name of a model in results: an alias itself, or the last part of a path or hub id."""
    return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf").lower()


def _open(
    options: EngineOptions, speculative: SpeculativeConfig | None
) -> tuple[dict[str, Any], Checkpoint, Tokenizer | None]:
    """The configuration and, if a draft model must match it, the tokenizer of a checkpoint."""
    from slipstream.engine.build import open_target

    checkpoint = open_target(options)
    needs_tokenizer = speculative is not None and speculative.model is not None
    return checkpoint.config, checkpoint, checkpoint.tokenizer() if needs_tokenizer else None


def _measure_all(options: EngineOptions, workload: Workload, shape: str | None, case: str) -> tuple[list[Row], str]:
    """The rows, and the device they were measured on."""
    from slipstream.engine.build import build_engine, build_shape
    from slipstream.engine.client import EngineClient

    with _notes().status(f"loading {case}"):
        client = EngineClient.in_thread(lambda: build_engine(options) if shape is None else build_shape(options, shape))
    rows: list[Row] = []
    try:
        for batch in workload.batches:
            runs = measure_batch(client, workload, batch, seed=options.seed or 0)
            rows.append(result_row(case, batch, workload, client.config, runs, weights="random" if shape else "model"))
            _notes().print(f"{case}, batch {batch}: {rows[-1]['tok_s']:,.1f} tokens per second", highlight=False)
    finally:
        client.close()
    return rows, client.config.device


def measure_batch(client: EngineClient, workload: Workload, batch: int, *, seed: int) -> list[BatchRun]:
    """A short warm-up, then the measured runs. Every run has the same prompts."""
    config, generator = client.config, random.Random(seed)
    prompts = [[generator.randrange(config.model.vocab_size) for _ in range(workload.prompt_len)] for _ in range(batch)]
    # Long enough for a few steps of the whole batch, after the steps in which the prompts are computed.
    num_prefill_steps = -(-batch * workload.prompt_len // config.scheduler.max_num_batched_tokens)
    lengths = [min(workload.output_len, 4 + 2 * num_prefill_steps)] + [workload.output_len] * workload.repeat
    runs = []
    with _progress() as progress:
        for idx, output_len in enumerate(lengths):
            label = f"batch {batch}, run {idx} of {workload.repeat}" if idx else f"batch {batch}, warm-up"
            task = progress.add_task(label, total=batch * output_len)
            runs.append(run_batch(client, prompts, output_len, partial(progress.advance, task)))
            progress.remove_task(task)
    return runs[1:]


def result_row(
    case: str, batch: int, workload: Workload, config: EngineConfig, runs: list[BatchRun], *, weights: str
) -> Row:
    rates = [decode_rate(run.arrivals) for run in runs]
    best = runs[rates.index(max(rates))]
    return {
        "case": case,
        "batch": batch,
        "tok_s": round(max(rates), 2),
        "tok_s_runs": [round(rate, 2) for rate in rates],
        "first_token_s": round(min(run.first_token_s for run in runs), 4),
        "prompt_len": workload.prompt_len,
        "output_len": workload.output_len,
        "weights": weights,
        "device": config.device,
        "dtype": config.dtype,
        "weight_formats": config.weight_formats,
        "attention_backend": config.attention_backend,
        **_speculation(config.speculative, best.drafts),
    }


def _speculation(speculative: SpeculativeConfig | None, drafts: DraftStats) -> Row:
    """Acceptance in the best run; empty where the engine does not draft."""
    if speculative is None:
        return {}
    drafts.is_synthetic = speculative.is_synthetic
    figures = drafts.as_dict()
    accepted_len = figures.pop("mean_length")
    return {"k": speculative.num_drafts, "verify": speculative.verify, "accepted_len": accepted_len, **figures}


def check_room(
    options: EngineOptions,
    workload: Workload,
    hf_config: dict[str, Any],
    checkpoint: Checkpoint | None,
    tokenizer: Tokenizer | None,
    name: str,
) -> None:
    """Refuse what does not fit into the model's context, the KV cache or memory, before anything is allocated."""
    from slipstream.engine.build import plan_engine
    from slipstream.models.registry import architecture_of

    max_position = architecture_of(hf_config).read_config(hf_config).max_position
    workload.check_length(f"the context of {name}", max_position)
    workload.check(plan_engine(options, hf_config, checkpoint, tokenizer).config)


def _table(rows: list[Row], hardware: str) -> Table:
    table = Table("case", title=f"output tokens per second, decode part, best run, on {hardware}")
    for name in ("batch", "tokens per second", "a request", "time to first token"):
        table.add_column(name, justify="right")
    drafts = any("accepted_len" in row for row in rows)
    if drafts:
        table.add_column("drafts accepted", justify="right")
        table.add_column("mean length", justify="right")
    for row in rows:
        rate, batch = row["tok_s"], row["batch"]
        first = f"{1000 * row['first_token_s']:,.0f} ms"
        acceptance = (f"{row['accepted']} of {row['drafts']}", f"{row['accepted_len']:.2f}") if drafts else ()
        table.add_row(row["case"], str(batch), f"{rate:,.1f}", f"{rate / batch:,.1f}", first, *acceptance)
    if any("synthetic" in row for row in rows):
        table.caption = f"SYNTHETIC: {SYNTHETIC_NOTICE}"
    return table


def _notes() -> Console:
    return Console(stderr=True)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total} tokens"))
    console = _notes()
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
