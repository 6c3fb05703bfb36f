"""``slipstream tune``: measure how the products of a model are best cut on this GPU, and remember it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.kernels.tiles import (
    MEASURED_TOKENS,
    Measured,
    Weight,
    forget_tables,
    read_table,
    user_file,
    versions,
    write_table,
)
from slipstream.kernels.tuning import Heads, compile_all, measure, measure_layer
from slipstream.models.fused_layer import layer_weights
from slipstream.models.hub import resolve_model
from slipstream.models.registry import architecture_of
from slipstream.models.shapes import SHAPES, shape_config
from slipstream.models.weights import open_checkpoint

_DTYPE = torch.bfloat16  # float16 has the same width, and the same tiles


def run(model: str, *, output: Path | None, jobs: int | None) -> int:
    if not torch.cuda.is_available():
        raise ConfigError("tune measures kernels of a GPU, and there is none here")
    config = _config_of(model)
    head = Weight("head", config.vocab_size, config.hidden_size, 2)
    layer, heads = layer_weights(config, 2), Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    weights = [*layer, head]
    gpu = torch.cuda.get_device_name()
    path = output or user_file(gpu)
    console = Console(stderr=True)
    table = {name: dict(sizes) for name, sizes in read_table(path, versions()).items()}
    work = [(weight, tokens) for weight in dict.fromkeys(weights) for tokens in MEASURED_TOKENS]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        compiled = progress.add_task("compiling", total=len(work))
        num_jobs = min(len(work), jobs or os.cpu_count() or 1)
        # A process that has a CUDA context cannot be forked.
        with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(compile_all, weight, tokens, _DTYPE) for weight, tokens in work]
            for future in futures:
                future.result()
                progress.advance(compiled)
        measured = progress.add_task("measuring", total=len(MEASURED_TOKENS))
        for tokens in MEASURED_TOKENS:
            found = measure_layer(layer, heads, tokens, _DTYPE) | {head.name: measure(head, tokens, _DTYPE)}
            for name, one in found.items():
                table.setdefault(name, {})[tokens] = one
            progress.advance(measured)
    write_table(path, gpu, table, versions())
    forget_tables()
    _show(weights, table)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)
    return 0


def _config_of(model: str) -> ModelConfig:
    hf_config = shape_config(model) if model in SHAPES else open_checkpoint(resolve_model(model)).config
    config = architecture_of(hf_config).read_config(hf_config)
    if config.experts is not None:
        raise ConfigError(f"{model} has experts: their products are not cut by this table")
    return config


def _show(weights: list[Weight], table: dict[str, dict[int, Measured]]) -> None:
    title = "microseconds of the fastest tile, and of cuBLAS with kernels of their own around it"
    shown = Table("weight", "tokens", "fastest", "plain", "tile", title=title)
    for weight in dict.fromkeys(weights):
        for tokens, (tile, us, plain_us) in sorted(table.get(weight.name, {}).items()):
            cut = "registers" if tile.tokens == 0 else f"{tile.tokens}x{tile.rows}x{tile.columns}"
            cut = f"{cut}, {tile.rows} rows, {tile.num_warps} warps, {tile.num_stages} stages"
            shown.add_row(weight.name, str(tokens), f"{us:.2f}", f"{plain_us:.2f}", cut)
    Console(file=sys.stdout, width=110).print(shown)
