"""What the metadata of gated delta nets would cost with masks on the device, for which the host would have to wait.

Two parts, the second over random weights of Qwen3-Next's layers in bfloat16:

- builder: host time of the metadata's builder, with an idle GPU and with work queued in front of it. `ours` has host
  numbers and nothing sorted apart. `host masks` sorts requests apart by kind with masks on the host, `device masks`
  with masks on the device, as a builder of another engine did before and after such waits were removed from it.
- engine: a fixed number of requests under way, each that ends is followed by another, so that prompts mix with drafts.
  The product records its builder in graphs; it runs in steps without one, which have many prompt tokens. `planted` has
  device masks there. The other two run a builder in front of every step, as where metadata are made outside graphs.
  Throughput counts all output tokens; the time to the first token is that of requests which come while others decode.

    python benchmarks/gdn_masks.py [--parts builder,engine] [--rounds 3]
    python benchmarks/gdn_masks.py --device cpu          # tries it out: small sizes, no figures that mean anything
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from slipstream.attention.gdn import GDNAttentionMetadata, GDNBackend, Parts, spec_sequence_masks
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_shape
from slipstream.engine.core import EngineCore
from slipstream.models.shapes import SHAPES, shape_config
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams

PARTS = ("builder", "engine")
SHAPE, NUM_DRAFTS = "qwen3-next-16l-64e", 3
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 2048,
}
NUM_BUILDS = 50
BUSY_CYCLES = 2_000_000  # about a millisecond of an H200

Row = dict[str, Any]
Build = Callable[[CommonAttentionMetadata, int], GDNAttentionMetadata]


class Setting(NamedTuple):
    """What depends on where it runs."""

    device: str
    shape: str
    builder_batches: tuple[int, ...]
    concurrency: int
    num_requests: int
    max_prompt_len: int
    max_output_len: int


def setting_for(device: str) -> Setting:
    if device == "cuda":
        return Setting("cuda", SHAPE, (8, 64, 256), 32, 128, 1536, 128)
    SHAPES["qwen3-next-tiny"] = {**SHAPES[SHAPE], **TINY}
    return Setting("cpu", "qwen3-next-tiny", (4, 16), 3, 9, 48, 12)


# --- the builder --------------------------------------------------------------------------------------


def sort_apart(common: CommonAttentionMetadata, num_states: int, on_device: bool) -> GDNAttentionMetadata:
    """Metadata with requests sorted apart by kind: sizes of results are read off masks, on the host or the device."""
    assert common.batch_rows is not None
    num_reqs, device = common.num_reqs, common.query_start_loc.device
    lens = common.query_start_loc[: num_reqs + 1].diff()
    spec = spec_sequence_masks(common)
    known_lens = torch.from_numpy(np.diff(common.query_start_loc_cpu))
    size: dict[str, Any] = {"output_size": common.num_actual_tokens}
    if on_device:
        spec, known_lens, size = spec.to(device, non_blocking=True), lens, {}
    plain = (known_lens == 1) & ~spec
    parts = []
    for mask in (spec, plain, ~(spec | plain)):
        slots, own_lens = common.batch_rows[:num_reqs][mask], lens[mask]
        own_lens.cumsum(0)
        parts.append(Parts(slots.shape[0], int(known_lens[mask].sum())))
    # Whose each token is. Without a size the host waits to be told the sum.
    torch.repeat_interleave(torch.arange(num_reqs, device=device), lens, **size)
    return GDNAttentionMetadata(
        slots=common.batch_rows,
        starts=common.query_start_loc[:-1],
        counts=common.query_lens,
        positions=common.seq_lens - common.query_lens,
        max_count=common.max_query_len,
        in_chunks=common.max_query_len > num_states,
        spec_sequence_masks_cpu=spec,
        spec_decodes=parts[0],
        decodes=parts[1],
        prefills=parts[2],
    )


def host_masks(common: CommonAttentionMetadata, num_states: int) -> GDNAttentionMetadata:
    return sort_apart(common, num_states, on_device=False)


def device_masks(common: CommonAttentionMetadata, num_states: int) -> GDNAttentionMetadata:
    return sort_apart(common, num_states, on_device=True)


BUILDERS: dict[str, Build] = {
    "ours": GDNAttentionMetadata.build,
    "host masks": host_masks,
    "device masks": device_masks,
}


def step_of(batch: int, num_prompts: int, device: str) -> CommonAttentionMetadata:
    """Requests with drafts, one without where there are prompts, and those prompts."""
    num_plain = min(1, num_prompts)
    num_spec = batch - num_plain - num_prompts
    lens = np.array([1 + NUM_DRAFTS] * num_spec + [1] * num_plain + [256] * num_prompts, dtype=np.int32)
    starts = np.concatenate([[0], lens.cumsum()]).astype(np.int32)
    num_tokens, counts = int(starts[-1]), torch.from_numpy(lens).to(device)
    return CommonAttentionMetadata(
        num_reqs=batch,
        num_actual_tokens=num_tokens,
        max_query_len=int(lens.max()),
        query_start_loc=torch.from_numpy(starts).to(device),
        query_start_loc_cpu=starts,
        query_lens=counts,
        seq_lens=counts + 512,
        seq_lens_cpu_upper_bound=lens + 512,
        block_table=torch.zeros(batch, 1, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        batch_rows=torch.arange(1, batch + 1, dtype=torch.int32, device=device),
        num_drafts_cpu=np.where(np.arange(batch) < num_spec, NUM_DRAFTS, 0).astype(np.int32),
    )


def host_microseconds(build: Build, common: CommonAttentionMetadata, device: str, is_busy: bool) -> float:
    times = []
    for _ in range(NUM_BUILDS):
        if device == "cuda":
            torch.cuda.synchronize()
            if is_busy:
                torch.cuda._sleep(BUSY_CYCLES)
        begin = time.perf_counter()
        build(common, 1 + NUM_DRAFTS)
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure_builder(setting: Setting) -> list[Row]:
    rows = []
    for mix, num_prompts in (("drafts", 0), ("drafts and prompts", 2)):
        for batch in setting.builder_batches:
            common = step_of(batch, num_prompts, setting.device)
            expected = GDNAttentionMetadata.build(common, 1 + NUM_DRAFTS)
            row: Row = {"part": "builder", "case": mix, "batch": batch}
            for name, build in BUILDERS.items():
                found = build(common, 1 + NUM_DRAFTS)
                for part in ("spec_decodes", "decodes", "prefills"):
                    if getattr(found, part) != getattr(expected, part):
                        raise SystemExit(f"{name} counts other {part} than ours at batch {batch}, {mix}")
                for state in ("idle", "busy"):
                    us = host_microseconds(build, common, setting.device, state == "busy")
                    row[f"{name}, {state}, us"] = round(us, 1)
            rows.append(row)
    return rows


# --- the engine ---------------------------------------------------------------------------------------


class Variant(NamedTuple):
    in_launched: Build | None  # the builder of steps that no graph holds; None: the product's
    every_step: Build | None  # one more, in front of every step


VARIANTS = {
    "as built": Variant(None, None),
    "planted": Variant(device_masks, None),
    "host masks, every step": Variant(None, host_masks),
    "device masks, every step": Variant(None, device_masks),
}


@contextmanager
def planted(core: EngineCore, variant: Variant) -> Iterator[list[int]]:
    """Builders of a variant in an engine that has all its graphs; gives how often one ran."""
    executor, backends = core.runner.executor, [group.backend for group in core.runner.caches.groups]
    (gdn,) = (backend for backend in backends if isinstance(backend, GDNBackend))
    run, num_built = executor.run, [0]
    launched = variant.in_launched or GDNAttentionMetadata.build

    def build(common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        num_built[0] += 1
        return launched(common, gdn.num_states)

    def run_after(batch: Any) -> Any:
        if variant.every_step is not None:
            num_built[0] += 1
            variant.every_step(batch.inputs.attention, gdn.num_states)
        return run(batch)

    # On the objects: their classes are as they were when these are gone.
    vars(gdn)["build"], vars(executor)["run"] = build, run_after
    try:
        yield num_built
    finally:
        del vars(gdn)["build"], vars(executor)["run"]


def drawn_requests(setting: Setting, name: str) -> list[Request]:
    """The same for every variant. Prompts repeat a few tokens, so that there is something to draft from."""
    rng, vocab_size = random.Random(0), shape_config(setting.shape)["vocab_size"]
    params = SamplingParams(temperature=0.0, seed=0, ignore_eos=True).with_defaults(SamplingParams())
    requests = []
    for i in range(setting.num_requests):
        length = rng.randint(setting.max_prompt_len // 8, setting.max_prompt_len)
        tokens = [rng.randrange(vocab_size) for _ in range(16)]
        prompt = tuple((tokens * (length // 16 + 1))[:length])
        num_tokens = rng.randint(setting.max_output_len // 4, setting.max_output_len)
        requests.append(Request(f"{name}-{i}", prompt, params, (), length + num_tokens))
    return requests


def serve(core: EngineCore, requests: list[Request], concurrency: int) -> tuple[float, list[float]]:
    """Tokens a second, and the seconds to the first token of requests that came while others decoded."""
    waiting, came, first = list(reversed(requests)), dict[str, float](), dict[str, float]()
    num_tokens, begin = 0, time.monotonic()
    for _ in range(min(concurrency, len(requests))):
        core.add(waiting.pop())
    while core.has_work:
        updates = core.step()
        for request_id, new in zip(updates.request_ids, updates.token_ids, strict=True):
            num_tokens += len(new)
            if new:
                first.setdefault(request_id, updates.time)
        for _ in updates.ended:
            if waiting:
                request = waiting.pop()
                came[request.request_id] = time.monotonic()
                core.add(request)
    expected = sum(request.max_total_tokens - len(request.prompt_token_ids) for request in requests)
    if num_tokens != expected:
        raise SystemExit(f"{num_tokens} tokens were generated of {expected}")
    return num_tokens / (time.monotonic() - begin), [first[name] - came[name] for name in came]


def open_engine(setting: Setting) -> Engine:
    on_gpu = setting.device == "cuda"
    options = EngineOptions(
        device=setting.device,
        dtype="bfloat16" if on_gpu else "float32",
        enable_prefix_caching=False,
        max_num_seqs=setting.concurrency,
        max_model_len=2048,
        cudagraph_capture_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if on_gpu else None,
        speculative_config={"method": "ngram", "num_speculative_tokens": NUM_DRAFTS},
        seed=0,
    )
    engine = build_shape(options, setting.shape)
    # A planted builder cannot be recorded, so nothing may be left to record.
    while engine.core.use_idle_time():
        pass
    return engine


def measure_engine(setting: Setting, num_rounds: int) -> list[Row]:
    core = open_engine(setting).core
    print(f"engine: {core.stats.num_graphs} graphs", file=sys.stderr, flush=True)
    serve(core, drawn_requests(setting, "warm-up"), setting.concurrency)
    runs: dict[str, list[Row]] = {name: [] for name in VARIANTS}
    for idx in range(num_rounds):
        for name, variant in VARIANTS.items():  # in turn, so that whatever drifts drifts for all
            num_steps, host_s = core.stats.num_steps, core.stats.host_s.total
            drafts, accepted = core.stats.num_draft_tokens, core.stats.num_accepted_tokens
            with planted(core, variant) as num_built:
                rate, first = serve(core, drawn_requests(setting, f"{name}-{idx}"), setting.concurrency)
            steps = core.stats.num_steps - num_steps
            run = {"tok_s": rate, "first_ms": 1e3 * statistics.mean(first)}
            run |= {"first_p99_ms": 1e3 * float(np.percentile(first, 99)), "steps": steps}
            run |= {"builds": num_built[0], "host_us": 1e6 * (core.stats.host_s.total - host_s) / steps}
            run |= {"drafts": core.stats.num_draft_tokens - drafts}
            runs[name].append({**run, "accepted": core.stats.num_accepted_tokens - accepted})
            print(f"{name}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    rows: list[Row] = []
    for name, found in runs.items():
        figures = {key: round(statistics.median(run[key] for run in found), 2) for key in found[0]}
        base = rows[0] if rows else figures
        ratios = {key: round(figures[key] / base[key], 3) for key in ("tok_s", "first_ms")}
        row = {"part": "engine", "case": name, "batch": setting.concurrency, **figures}
        rows.append({**row, "tok_s_ratio": ratios["tok_s"], "first_ratio": ratios["first_ms"]})
    return rows


# --- all of it ----------------------------------------------------------------------------------------


def print_table(rows: list[Row], part: str, hardware: str) -> None:
    table = Table(title=f"{part}, {hardware}")
    names = [name for name in rows[0] if name != "part"]
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "case" else "right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    Console(width=160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="of the engine's variants")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"unknown part {unknown[0]}; there are {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no NVIDIA GPU to measure; --device cpu tries the script out at small sizes")
    prepare_folder(arguments.output_dir)
    setting, rows = setting_for(arguments.device), []
    with torch.inference_mode():
        if "builder" in parts:
            rows += measure_builder(setting)
        if "engine" in parts:
            rows += measure_engine(setting, arguments.rounds)
    results = collect_results(rows, device=arguments.device)
    path = write_results(results, arguments.output_dir, f"gdn-masks-{setting.shape}")
    for part in parts:
        print_table([row for row in rows if row["part"] == part], part, results.hardware)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
