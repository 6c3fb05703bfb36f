"""Heads with forced acceptance beside plain decoding, and vLLM on the same GPU: what a speculative step costs.

Random weights of a shape and of a head's (EAGLE-3 with a draft vocabulary of 32,000; DFlash with five layers), greedy,
prompts of 128 tokens, end of sequence ignored, prefix caching off, the rate of the decode part. Drafts are accepted at
fixed rates (high: vLLM's .730 .521 .355, continued .245 .170 .118 .082), whatever they say: THE TEXT MEANS NOTHING.
vLLM's column was measured on an NVIDIA H200 (vLLM 0.26.0, torch 2.11, CUDA 13.0).

With ``--accepted-len`` the first i drafts are all accepted with probability p^i, with the p of which steps with the
longest draft bring so many tokens. A shorter draft keeps that p. Published accepted lengths are those of trained heads
on real texts; here acceptance is forced, and the figure is what the engine makes of it.

    python benchmarks/speculative_throughput.py [--shape llama-3.1-8b] [--batch 1,8,64] [--k 0,3]
    python benchmarks/speculative_throughput.py --k 0,1,2,3,4,5,6,7 --batch 1,2,4,8,16,32,64,128    # the sweep
    python benchmarks/speculative_throughput.py --k adaptive --rates high,low,zero --batch 1,2,4,8,16,32,64,128
    python benchmarks/speculative_throughput.py --change --batch 1,8,64     # acceptance that changes in mid-run
    python benchmarks/speculative_throughput.py --method dflash --shape qwen3-8b --k 0,15 --accepted-len 6.92,9.56
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from slipstream.commands.measure import BatchRun, decode_rate, in_turns, run_batch, wait_for_graphs
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_shape
from slipstream.engine.client import EngineClient
from slipstream.models.shapes import FORCED_RATES, forced_drafts, forced_rates, shape_config, step_bytes
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams
from vllm_figures import eagle3_peer

RATES = {"high": FORCED_RATES, "low": (0.30, 0.08, 0.02, 0.005, 0.0, 0.0, 0.0), "zero": (0.0,) * 7}
MOST = {"eagle3": len(FORCED_RATES), "dflash": 15}  # drafts
SETTLE_LIMIT = 50  # steps within which a change is to be followed
BANDWIDTH = 4.15e12  # bytes a second that an NVIDIA H200 was measured to read


class Setting(NamedTuple):
    """What all engines of a run have in common."""

    shape: str
    method: str
    device: str
    dtype: str
    max_batch: int

    @property
    def most(self) -> int:
        return MOST[self.method]

    def options(self, k: str) -> EngineOptions:
        speculative = None
        none = (0.0,) * self.most  # set before every run
        if k == "adaptive":
            speculative = {**forced_drafts(self.method, self.shape, self.most, none), "adaptive": True}
        elif int(k):
            speculative = forced_drafts(self.method, self.shape, int(k), none)
        return EngineOptions(
            device=self.device,
            dtype=self.dtype,
            enable_prefix_caching=False,
            max_num_seqs=self.max_batch,
            max_model_len=1024,
            speculative_config=speculative,
            seed=0,
        )


class Rates(NamedTuple):
    """Forced acceptance: its name, and the probability that the first i + 1 drafts are all accepted."""

    name: str
    values: tuple[float, ...]
    accepted_len: float | None = None  # tokens a step with the longest draft, if that was asked for


def rates_of(arguments: argparse.Namespace, most: int) -> list[Rates]:
    if arguments.accepted_len:
        lengths = [float(length) for length in arguments.accepted_len.split(",")]
        return [Rates(f"p^i, {length:g}", forced_rates(length, most), length) for length in lengths]
    return [Rates(name, (*RATES[name], *[0.0] * most)[:most]) for name in arguments.rates.split(",")]


def prompts_for(shape: str, batch: int) -> list[list[int]]:
    rng, vocab_size = random.Random(0), shape_config(shape)["vocab_size"]
    return [[rng.randrange(vocab_size) for _ in range(128)] for _ in range(batch)]


class Contestant:
    """One engine, and how often it was measured at what."""

    def __init__(self, setting: Setting, k: str) -> None:
        self.setting, self.k = setting, k
        built: list[Engine] = []

        def build() -> Engine:
            built.append(build_shape(setting.options(k), setting.shape))
            return built[0]

        self.client = EngineClient.in_thread(build)
        self._verifier = built.pop().core.runner.head.generate.verifier

    def wait(self) -> None:
        wait_for_graphs(self.client)
        stats = self.client.stats
        text = f"k = {self.k}: {stats.num_graphs} graphs, {stats.graph_bytes / 2**20:.0f} MiB"
        print(text, file=sys.stderr, flush=True)

    def run(self, rates: Rates, prompts: list[list[int]], output_len: int) -> BatchRun:
        if self.k != "0":
            self._verifier.set_rates(rates.values[: self.setting.most if self.k == "adaptive" else int(self.k)])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return run_batch(self.client, prompts, output_len)

    def row(self, rates: Rates, runs: list[BatchRun], output_len: int, batch: int) -> dict[str, Any]:
        """The first run is for warming up."""
        best = max(runs[1:], key=lambda run: decode_rate(run.arrivals))
        rate, length = decode_rate(best.arrivals), best.tokens_a_step
        shape, method, is_plain = self.setting.shape, self.setting.method, self.k == "0"
        peer = eagle3_peer(shape, self.k, batch) if rates.name == "high" and method == "eagle3" else None
        line = f"{shape}, k = {self.k}, {rates.name}, batch {batch}: {rate:,.0f} tokens/s"
        print(line, file=sys.stderr, flush=True)
        step_s = batch * length / rate
        drafts = self.setting.most if self.k == "adaptive" else int(self.k)
        weights_s = step_bytes(shape, drafts, method) / BANDWIDTH
        return {
            "case": shape if is_plain else f"{shape}+{method}",
            "batch": batch,
            "tok_s": round(rate, 1),
            "k": self.k,
            "rates": rates.name,
            "accepted_len": None if is_plain else rates.accepted_len,
            "forced": not is_plain,
            "output_len": output_len,
            "num_runs": len(runs) - 1,
            "synthetic": not is_plain,
            "mean_length": round(length, 3),
            "step_ms": round(1000 * step_s, 3),
            "weights_ms": round(1000 * weights_s, 3),
            "vllm_tok_s": peer,
            "ratio": round(rate / peer, 3) if peer else None,
        }


def measure(arguments: argparse.Namespace, k: str, batches: list[int]) -> list[dict[str, Any]]:
    """One engine alone, or an adaptive one and plain decoding in turns: a GPU is not as fast at one time as at another,
    and what is asked of the two is a ratio.
    """
    beside = ["0", "adaptive"] if k == "adaptive" else [k]
    contestants, rows = [], []
    setting = setting_of(arguments, batches)
    try:
        for one in beside:
            contestants.append(Contestant(setting, one))
            contestants[-1].wait()
        all_rates = rates_of(arguments, setting.most)
        for rates in all_rates if k != "0" else all_rates[:1]:
            for batch in batches:
                prompts = prompts_for(arguments.shape, batch)
                each = [partial(contestant.run, rates, prompts, arguments.output_len) for contestant in contestants]
                for contestant, runs in zip(contestants, in_turns(arguments.repeat + 1, each), strict=True):
                    rows.append(contestant.row(rates, runs, arguments.output_len, batch))
    finally:
        for contestant in contestants:
            contestant.client.close()
    return rows


def setting_of(arguments: argparse.Namespace, batches: list[int]) -> Setting:
    return Setting(arguments.shape, arguments.method, arguments.device, arguments.dtype, max(batches))


def follow_change(arguments: argparse.Namespace, batches: list[int]) -> list[dict[str, Any]]:
    """Steps until the draft length is where it settles, after acceptance went from nothing to high and back."""
    setting = setting_of(arguments, batches)
    engine = build_shape(setting.options("adaptive"), arguments.shape)
    core = engine.core
    while core.use_idle_time():
        pass
    verifier = core.runner.head.generate.verifier
    rows = []
    for batch in batches:
        for i, prompt in enumerate(prompts_for(arguments.shape, batch)):
            # With one seed for all, drafts at the same position would all be accepted or all rejected.
            params = SamplingParams(temperature=0.0, seed=i, ignore_eos=True).with_defaults(SamplingParams())
            core.add(Request(f"{batch}-{i}", tuple(prompt), params, (), 1023))
        for name, count in (("zero", 120), ("high", 150), ("zero", 150)):
            with core.runner.device.use_stream(core.runner.device.compute_stream):
                verifier.set_rates((*RATES[name], *[0.0] * setting.most)[: setting.most])
            torch.cuda.synchronize()
            lengths = []
            for _ in range(count):
                core.step()
                lengths.append(core.stats.draft_length)
            settled = sorted(lengths[-60:])[30]
            near = [i for i, k in enumerate(lengths) if k == settled]
            row = {"case": f"to {name}", "batch": batch, "settles_at": settled, "after_steps": near[0]}
            rows.append({**row, "lengths": lengths})
            print(f"batch {batch}, to {name}: {settled} after {near[0]} steps", file=sys.stderr, flush=True)
        for i in range(batch):
            core.finish(f"{batch}-{i}")
        while core.has_work:
            core.step()
    return rows


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    table = Table("case", title=title)
    if "after_steps" in rows[0]:
        for name in ("batch", "draft length", "reached after steps", f"within {SETTLE_LIMIT}"):
            table.add_column(name, justify="right")
        for row in rows:
            within = "yes" if row["after_steps"] <= SETTLE_LIMIT else "no"
            table.add_row(row["case"], str(row["batch"]), str(row["settles_at"]), str(row["after_steps"]), within)
    else:
        # Those in turns with an adaptive engine have the same rates beside them.
        plain = {(row["batch"], row["rates"]): row["tok_s"] for row in rows if row["k"] == "0"}
        first = {row["batch"]: row["tok_s"] for row in reversed(rows) if row["k"] == "0"}
        names = ("k", "accepted", "batch", "tokens/s", "of plain", "vLLM", "ratio", "tokens a step", "ms a step")
        for name in (*names, "ms for the weights"):
            table.add_column(name, justify="right")
        for row in rows:
            peer = [f"{row['vllm_tok_s']:,}", f"{row['ratio']:.2f}"] if row["vllm_tok_s"] else ["", ""]
            beside = plain.get((row["batch"], row["rates"]), first.get(row["batch"]))
            share = f"{row['tok_s'] / beside:.3f}" if beside else ""
            figures = (f"{row['tok_s']:,.0f}", share, *peer, f"{row['mean_length']:.2f}", f"{row['step_ms']:.2f}")
            figures = (*figures, f"{row['weights_ms']:.2f}")
            rates = row["rates"] if row["synthetic"] else ""
            table.add_row(row["case"], row["k"], rates, str(row["batch"]), *figures)
    Console(width=140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--method", default="eagle3", choices=MOST)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--accepted-len", help="tokens a step, instead of --rates: one or more numbers")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--k", default="0,3", help="numbers, 0 for plain decoding, or adaptive, beside plain decoding")
    parser.add_argument("--rates", default="high", help=f"of {', '.join(RATES)}")
    parser.add_argument("--change", action="store_true", help="how soon a change of acceptance is followed")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    batches = [int(size) for size in arguments.batch.split(",")]
    if arguments.change:
        rows, kind = follow_change(arguments, batches), "draft-length-changes"
    else:
        rows = [row for k in arguments.k.split(",") for row in measure(arguments, k, batches)]
        kind = "speculative-throughput"
    results = collect_results(rows, device=arguments.device)
    path = write_results(results, arguments.output_dir, f"{kind}-{arguments.shape}")
    print_table(rows, f"output tokens per second, forced acceptance, {results.hardware}")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
