"""The cost part of ``exact.py``: exact engines against default ones, taking turns within one run."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slipstream.commands.measure import BatchRun, decode_rate, in_turns, run_batch, wait_for_graphs
from slipstream.commands.results import Row
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine, build_shape
from slipstream.engine.client import EngineClient

TURNS = 5
SHARE = 0.42  # of a GPU's memory, for each of two engines


def compare_cost(
    base: EngineOptions, name: str, shape: str | None, batches: tuple[int, ...], lengths: tuple[int, int]
) -> list[Row]:
    """Ratios of rates, decoding and of prompts: the median over turns in which both run one after the other."""
    prompt_len, output_len = lengths
    pair = [replace(base, exact=exact, gpu_memory_utilization=SHARE * (1 + exact)) for exact in (False, True)]
    clients = [open_client(options, shape) for options in pair]
    rows: list[Row] = []
    try:
        for client in clients:
            wait_for_graphs(client)
        vocab_size, rng = clients[0].config.model.vocab_size, random.Random(0)
        phase = "decode" if base.speculative_config is None else "decode with drafts"
        for batch in batches:
            prompts = [[rng.randrange(vocab_size) for _ in range(prompt_len)] for _ in range(batch)]
            rows.append(compared(clients, prompts, output_len, name, phase))
        for count in (1, 8):
            prompts = [[rng.randrange(vocab_size) for _ in range(8 * prompt_len)] for _ in range(count)]
            rows.append(compared(clients, prompts, 3, name, "prompt"))
    finally:
        for client in clients:
            client.close()
    return rows


def open_client(options: EngineOptions, shape: str | None) -> EngineClient:
    return EngineClient.in_thread(lambda: build_engine(options) if shape is None else build_shape(options, shape))


def compared(clients: list[EngineClient], prompts: list[list[int]], output_len: int, name: str, phase: str) -> Row:
    rate_of: Callable[[BatchRun], float] = prompt_rate(prompts) if phase == "prompt" else decode_rate_of
    runs: list[Callable[[], BatchRun]] = [lambda c=client: run_batch(c, prompts, output_len) for client in clients]  # type: ignore[misc]
    for run in runs:  # kernels are compiled, graphs are there
        run()
    plain, exact = ([rate_of(run) for run in own] for own in in_turns(TURNS, runs))
    ratio = statistics.median(b / a for a, b in zip(plain, exact, strict=True))
    row: dict[str, Any] = {
        "case": "exact-cost",
        "model": name,
        "batch": len(prompts),
        "phase": phase,
        "prompt_len": len(prompts[0]),
        "ratio": round(ratio, 4),
        "tok_s": round(statistics.median(exact), 1),
        "default_tok_s": round(statistics.median(plain), 1),
    }
    print(f"{row}", file=sys.stderr, flush=True)
    return row


def decode_rate_of(run: BatchRun) -> float:
    return decode_rate(run.arrivals)


def prompt_rate(prompts: list[list[int]]) -> Callable[[BatchRun], float]:
    """Prompt tokens a second, until the last request has its first token."""

    def rate(run: BatchRun) -> float:
        firsts = {arrival.request_idx: arrival.time for arrival in reversed(run.arrivals) if arrival.num_tokens}
        return sum(map(len, prompts)) / (max(firsts.values()) - run.start)

    return rate
