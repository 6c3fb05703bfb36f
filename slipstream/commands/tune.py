"""``slipstream tune``: measure the fastest tiles for a model's products on this GPU, and store them."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from slipstream.checkpoints.head_checkpoint import open_head_checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.kernels.tuning.measurement import Heads, compile_all, measure, measure_layer
from slipstream.kernels.tuning.tiles import (
    MEASURED_TOKENS,
    Measured,
    Table,
    Weight,
    forget_tables,
    read_table,
    table_of,
    user_file,
    versions,
    write_table,
)
from slipstream.models.fused_layer import layer_weights
from slipstream.models.heads.fused_head import head_weights
from slipstream.models.heads.registry import read_head
from slipstream.models.load import open_decoder
from slipstream.models.registry import architecture_of
from slipstream.models.shapes import HEAD_SHAPES, SHAPES, shape_config

_DTYPE, _WIDTH = torch.bfloat16, 2  # float16 has the same width, and the same tiles


class _Work(NamedTuple):
    """The products to measure."""

    layer: tuple[Weight, ...]
    heads: Heads
    alone: tuple[Weight, ...]  # products outside the layers
    shared: frozenset[str]  # names of weights whose known tiles are kept


def run(model: str, *, head: str | None, output: Path | None, jobs: int | None) -> int:
    if not torch.cuda.is_available():
        raise ConfigError("tune measures kernels of a GPU, and there is none here")
    config = _config_of(model)
    work = _work_of(config) if head is None else _head_work(head, config)
    gpu = torch.cuda.get_device_name()
    path = output or user_file(gpu)
    console = Console(stderr=True)
    table = {name: dict(sizes) for name, sizes in read_table(path, versions()).items()}
    known = {name: sizes for name, sizes in {**table_of(gpu), **table}.items() if name in work.shared}
    weights = [weight for weight in dict.fromkeys([*work.layer, *work.alone]) if weight.name not in known]
    _compile_and_measure(work, weights, known, table, jobs, console)
    write_table(path, gpu, table, versions())
    forget_tables()
    _show(weights, table)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)
    return 0


def _compile_and_measure(
    work: _Work,
    weights: Sequence[Weight],
    known: Table,
    table: dict[str, dict[int, Measured]],  # filled for every number of tokens
    jobs: int | None,
    console: Console,
) -> None:
    pairs = [(weight, tokens) for weight in weights for tokens in MEASURED_TOKENS]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        compiled = progress.add_task("compiling", total=len(pairs))
        num_jobs = max(1, min(len(pairs), jobs or os.cpu_count() or 1))
        # A process that has a CUDA context cannot be forked.
        with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(compile_all, weight, tokens, _DTYPE) for weight, tokens in pairs]
            for future in futures:
                future.result()
                progress.advance(compiled)
        measured = progress.add_task("measuring", total=len(MEASURED_TOKENS))
        for tokens in MEASURED_TOKENS:
            tiles = {name: sizes[tokens].tile for name, sizes in known.items() if tokens in sizes}
            found = {weight.name: measure(weight, tokens, _DTYPE) for weight in work.alone if weight in weights}
            if any(weight in weights for weight in work.layer):
                found |= measure_layer(work.layer, work.heads, tokens, _DTYPE, tiles)
            for name, one in found.items():
                table.setdefault(name, {})[tokens] = one
            progress.advance(measured)


def _work_of(config: ModelConfig) -> _Work:
    logits = Weight("head", config.vocab_size, config.hidden_size, _WIDTH)
    return _Work(layer_weights(config, _WIDTH), _heads_of(config), (logits,), frozenset())


def _head_work(head: str, target: ModelConfig) -> _Work:
    """The products of a draft head that its target does not have."""
    hf_config = HEAD_SHAPES.get(head) or open_head_checkpoint(resolve_model(head, is_head=True)).config
    plan, own = read_head(hf_config, target), _work_of(target)
    weights = head_weights(plan, _WIDTH)
    shared = frozenset(weight.name for weight in (*own.layer, *own.alone))
    return _Work(weights.layer, _heads_of(plan.config), (*weights.mix, weights.logits), shared)


def _heads_of(config: ModelConfig) -> Heads:
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim)


def _config_of(model: str) -> ModelConfig:
    hf_config = shape_config(model) if model in SHAPES else open_decoder(resolve_model(model)).config
    config = architecture_of(hf_config).read_config(hf_config)
    if config.experts is not None:
        raise ConfigError(f"{model} has experts: their products are not cut by this table")
    return config


def _show(weights: Sequence[Weight], table: Table) -> None:
    title = "microseconds of the fastest tile, and of cuBLAS with kernels of their own around it"
    shown = Grid("weight", "tokens", "fastest", "plain", "tile", title=title)
    for weight in dict.fromkeys(weights):
        for tokens, (tile, us, plain_us) in sorted(table.get(weight.name, {}).items()):
            cut = "registers" if tile.tokens == 0 else f"{tile.tokens}x{tile.rows}x{tile.columns}"
            cut = f"{cut}, {tile.rows} rows, {tile.num_warps} warps, {tile.num_stages} stages"
            shown.add_row(weight.name, str(tokens), f"{us:.2f}", f"{plain_us:.2f}", cut)
    Console(file=sys.stdout, width=110).print(shown)
