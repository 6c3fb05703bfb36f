"""Serving, prompts beside decodes, start-up, the host's part of a step, attention, and decoding on a CPU."""

from __future__ import annotations

from statistics import mean

from figures import GPU, NAMES, Results, number, rate, source, table, three_digits, wrapped
from result_files import select
from slipstream.commands.results import Row
from vllm_figures import SERVE, VERSION


def serving(results: Results) -> str:
    case = "smollm2-135m+serve"
    found: dict[tuple[str, int], Row] = {}
    for kind in (case, f"{case}+eagle3"):
        for result in select(results, kind, GPU):
            for row in result.rows:
                found.setdefault((row["case"], row["batch"]), row)
    batches = [batch for batch in SERVE if (case, batch) in found]
    if not batches:
        return ""
    intro = (
        f"Streamed chat over HTTP, {NAMES['smollm2-135m']}, 128 output tokens, closed loop, server and clients on one "
        "machine; tokens per second, and milliseconds to the first token, median / 99th percentile:"
    )
    lines, shown = [], []
    for own, name in ((case, "Slipstream"), (f"{case}+eagle3", "Slipstream, EAGLE-3, k adapts")):
        rows = [found.get((own, batch)) for batch in batches]
        if any(rows):
            shown += [row for row in rows if row]
            lines.append([f"{name}: tokens per second", *(rate(row) for row in rows)])
            times = ["" if row is None else _first_ms(row["ttft_p50_ms"], row["ttft_p99_ms"]) for row in rows]
            lines.append([f"{name}: first token", *times])
    lines.append([f"{VERSION}: tokens per second", *(number(SERVE[batch][0]) for batch in batches)])
    lines.append([f"{VERSION}: first token", *(_first_ms(*SERVE[batch][1:]) for batch in batches)])
    command = "slipstream bench serve --concurrency 1,8,32,128,512"
    where = source(command, shown, results, f"{VERSION} under the same load", f"one {GPU}, 16 CPU cores")
    return f"{wrapped(intro)}\n{table(['streams', *map(str, batches)], lines)}{where}"


def _first_ms(median: float, p99: float) -> str:
    return f"{number(median)} / {number(p99)}"


def arrivals(results: Results) -> str:
    """Prompts that arrive while other requests decode."""
    for result in select(results, "poisson-arrivals", GPU):
        rows = [row for row in result.rows if row["case"] in NAMES]
        if not rows:
            continue
        lines = [
            [
                f"{NAMES[row['case']]}, {'in pieces' if row['prompts'] == 'default' else row['prompts']}",
                _ms(row["first_token_ms_p50"], row["first_token_ms_p99"]),
                _ms(row["between_tokens_ms_p50"], row["between_tokens_ms_p99"]),
            ]
            for row in rows
        ]
        intro = (
            f"Prompts that arrive while other requests decode, {number(rows[0]['rate'])} requests a second in a "
            "Poisson process; milliseconds, median / 99th percentile. In pieces, the default, a prompt is cut so that "
            "a step stays short; in whole steps it is not:"
        )
        where = source("python benchmarks/poisson_arrivals.py", rows, results, "the same engine with whole steps")
        return f"{wrapped(intro)}\n{table(['prompts', 'first token', 'between tokens'], lines)}{where}"
    return ""


def _ms(median: float, p99: float) -> str:
    return f"{three_digits(median)} / {three_digits(p99)}"


def startup(results: Results) -> str:
    for result in select(results, "startup", GPU):
        rows = [row for row in result.rows if row["case"] == "smollm2-135m"]
        seconds: dict[str, list[float]] = {}
        for row in rows:
            seconds.setdefault(row["caches"], []).append(row["first_token_s"])
        if {"warm", "cold"} <= seconds.keys():
            warm, cold = (number(mean(seconds[kind])) for kind in ("warm", "cold"))
            text = wrapped(
                f"From the start of the process to the first token of SmolLM2: {warm} s, {cold} s with empty kernel "
                "caches."
            )
            return text + source("python benchmarks/startup.py", rows, results, "none measured")
    return ""


def host(results: Results) -> str:
    for result in select(results, "host-loop", GPU):
        us = {row["batch"]: row["host_us"] for row in result.rows if row["case"] == "plain"}
        if 1 in us and len(us) > 1:
            most = max(us)
            text = (
                f"A step of plain decoding takes the host {number(us[1])} µs for one request and {number(us[most])} µs "
                f"for {most}; the device computes meanwhile."
            )
            return wrapped(text) + source("python benchmarks/host_loop.py", result.rows, results, "none measured")
    return ""


def attention(results: Results) -> str:
    for result in select(results, "attention", GPU):
        us: dict[str, dict[tuple[int, ...], float]] = {"triton": {}, "flashinfer": {}}
        for row in result.rows:
            if row["case"] in us and not row.get("common"):
                us[row["case"]][row["batch"], row["query_len"], row["context"]] = row["us"]
        ratios = {key: us["flashinfer"][key] / own for key, own in us["triton"].items() if key in us["flashinfer"]}
        if ratios:
            low, high = number(min(ratios.values()), 2), number(max(ratios.values()), 1)
            contexts = [key[-1] for key in ratios]
            text = (
                f"Decode attention in Triton is {low} to {high} x FlashInfer's speed, from {number(min(contexts))} to "
                f"{number(max(contexts))} tokens of context."
            )
            return wrapped(text) + source("python benchmarks/attention.py", result.rows, results, "FlashInfer")
    return ""


def cpu(results: Results) -> str:
    for result in (result for result in results if result.kind == "smollm2-135m-vs-transformers"):
        rows = {(row["engine"], row["batch"]): row for row in result.rows if "engine" in row}
        batches = sorted({batch for _, batch in rows})
        version = next((f" {row['transformers']}" for row in rows.values() if "transformers" in row), "")
        intro = (
            f"{NAMES['smollm2-135m']} in float32, greedy, 64 output tokens, whole requests, both engines in turns in "
            "one run:"
        )
        lines = [
            [name, *(three_digits(rows[engine, batch]["tok_s"]) for batch in batches)]
            for engine, name in (("slipstream", "Slipstream"), ("transformers", f"transformers{version}"))
        ]
        head = ["output tokens per second", *(f"batch {batch}" for batch in batches)]
        where = source(
            "python benchmarks/cpu_vs_transformers.py",
            rows.values(),
            results,
            f"transformers{version} on the same machine",
            result.hardware,
        )
        return f"{wrapped(intro)}\n{table(head, lines)}{where}"
    return ""
