"""Requests with random parameters, with every drafter, against plain decoding one at a time: 0 differences.

Speculation must not change what comes out. Tiny random models in float64 on the CPU, where batching changes no token by
rounding, and for each drafter (none, n-gram, a draft model, EAGLE, EAGLE-3, MTP, and a gated delta net with and without
drafts) several engines: 1 to 7 drafts a step, fixed or adaptive or drawn, 1, 2 or 4 steps in flight, with and without
prefix cache, prompts in chunks, and so few pages that requests are preempted. Requests draw every sampling parameter;
their prompts begin alike; some are aborted in mid-stream, and their ids used again at once.

The reference is the same request by itself: batch 1, no drafts, no prefix cache, one step in flight, room for all.
Compared are token ids, text (as a whole and as it was streamed), finish and stop reason, and the log probabilities of
output and prompt, within 1e-9 or, where float32 can say no more, adjacent float32 numbers. What was aborted must be the
beginning of the plain run's.

Left out is ``verify="rejection"``: speculative sampling keeps the distribution, but its tokens are others than without
drafts, so there is nothing to compare one by one (``tests/speculate/test_unbiased_engine.py`` tests the distribution).

    python benchmarks/lossless_fuzz.py --requests 1000 --seed 0
    python benchmarks/lossless_fuzz.py --requests 1000 --seed 0 --only 123
    python benchmarks/lossless_fuzz.py --requests 1000 --seed 0 --device sim

The exit status is 1 where a request differs, a drafter had no draft accepted, or no request was preempted or aborted.
With ``--exact`` all engines run as users run them, in float32 on a CPU or in the checkpoint's type on a GPU, and
everything is compared to the bit.

With ``--device sim`` the engines run on the simulated GPU, in graphs, where steps are really under way while others are
launched. With ``--only`` the engine of that request runs again, with all its requests, and what came out of that one is
shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from lossless_fuzz_engines import DRAFTERS, EXACT_DRAFTERS
from lossless_fuzz_models import write_models
from lossless_fuzz_runs import PER_ENGINE, Difference, Fuzz, Judged, Outcome, Settings, Tally
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.errors import SlipstreamError

COLUMNS = ("requests", "tokens", "drafts", "accepted", "preemptions", "cached", "aborts", "differences")


def run_fuzz(settings: Settings, only: int | None = None, is_shown: bool = False) -> Outcome:
    """Write the checkpoints, run everything; the progress bar only where it ``is_shown``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    num_shown = settings.num_requests if only is None else min(settings.per_engine, settings.num_requests)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=Console(stderr=True), disable=not is_shown) as bar,
    ):
        task = bar.add_task("requests", total=num_shown)
        folders = write_models(Path(folder))
        return Fuzz(settings, folders, lambda: bar.advance(task)).run(only)


# --- what is shown and written ----------------------------------------------------------------------


def print_table(outcome: Outcome, title: str) -> None:
    table = Table("drafter", title=title)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for drafter, tally in outcome.tallies.items():
        table.add_row(drafter.name, *_make_cells(tally))
    total = Tally()
    for tally in outcome.tallies.values():
        total += tally
    table.add_section()
    table.add_row("all", *_make_cells(total))
    Console(width=120).print(table)
    ends = ", ".join(f"{count} by {kind}" for kind, count in total.ends.most_common())
    print(
        f"texts ended: {ends}; {total.num_logprobs:,} log probabilities compared, {total.num_rounded} one float32 apart"
    )


def _make_cells(tally: Tally) -> list[str]:
    share = f" ({tally.num_accepted / tally.num_drafts:.0%})" if tally.num_drafts else ""
    counts = (tally.num_requests, tally.num_tokens, tally.num_drafts, tally.num_accepted)
    texts = [f"{count:,}" for count in counts]
    texts[-1] += share
    others = (tally.num_preemptions, tally.num_cached_tokens, tally.num_aborted, tally.num_different)
    return [*texts, *(f"{count:,}" for count in others)]


def describe_difference(difference: Difference, command: str) -> list[str]:
    request, choice = difference.request, difference.choice
    return [
        f"request {request.idx}, {choice.drafter.name}:",
        *(f"  {line}" for line in difference.lines[:8]),
        *([f"  and {len(difference.lines) - 8} more lines"] if len(difference.lines) > 8 else []),
        f"  request: {_as_json(request.as_dict())}",
        f"  engine: {_as_json(choice.as_dict())}",
        f"  again: {command} --only {request.idx}",
    ]


def describe_judged(judged: Judged) -> list[str]:
    """Of the one request that was asked for."""
    lines = [
        f"request {judged.request.idx}, {judged.choice.drafter.name}: {_as_json(judged.request.as_dict())}",
        f"engine: {_as_json(judged.choice.as_dict())}",
    ]
    for name, output in (("with drafts", judged.found), ("plain, alone", judged.plain)):
        for completion in [] if output is None else output.outputs:
            end = f"{completion.finish_reason}, {completion.stop_reason!r}"
            lines += [f"{name} {completion.index}: {completion.token_ids}, {end}", f"  {completion.text!r}"]
    return lines


def _as_json(found: dict[str, Any]) -> str:
    return json.dumps(found, ensure_ascii=False)


def make_rows(outcome: Outcome, settings: Settings) -> list[Row]:
    rows: list[Row] = []
    for drafter, tally in outcome.tallies.items():
        figures = {name: value for name, value in vars(tally).items() if name.startswith("num_")}
        rate = tally.num_tokens / tally.seconds if tally.seconds else 0.0
        rows.append(
            {
                "case": drafter.case,
                "batch": max((choice.options["max_num_seqs"] for choice in tally.engines), default=0),
                "tok_s": round(rate, 1),
                "drafter": drafter.name,
                "seed": settings.seed,
                "device": settings.device,
                "exact": settings.exact,
                "seconds": round(tally.seconds, 1),
                **figures,
                "ends": dict(tally.ends),
                "engines": [choice.as_dict() for choice in tally.engines],
            }
        )
    for difference in outcome.differences:
        about = {"request": difference.request.as_dict(), "engine": difference.choice.as_dict()}
        batch, case = difference.choice.options["max_num_seqs"], difference.choice.drafter.case
        rows.append({"case": case, "batch": batch, "kind": "difference", **about, "lines": difference.lines})
    return rows


# --- the command ------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-engine", type=int, default=PER_ENGINE, help="requests of one engine")
    parser.add_argument(
        "--device",
        choices=("cpu", "sim", "cuda"),
        default="cpu",
        help="sim: on the simulated GPU, in graphs; 3 times as long; cuda: with --exact only",
    )
    parser.add_argument("--exact", action="store_true", help="engines with --exact, compared to the bit")
    parser.add_argument("--only", type=int, help="number of a request that is to be looked at again")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args(argv)
    if min(arguments.requests, arguments.per_engine) < 1:
        parser.error("--requests and --per-engine are at least 1")
    if (arguments.device, arguments.exact) in (("cuda", False), ("sim", True)):
        parser.error("float64 runs on cpu and sim, --exact on cpu and cuda")
    if arguments.only is not None and not 0 <= arguments.only < arguments.requests:
        parser.error(f"--only is one of the requests, 0 to {arguments.requests - 1}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    torch.set_num_threads(1)  # tiny models gain nothing from more
    transformers_logging.disable_progress_bar()  # of the checkpoints, in the middle of ours
    drafters = EXACT_DRAFTERS if arguments.exact else DRAFTERS
    settings = Settings(
        arguments.requests, arguments.seed, arguments.per_engine, drafters, arguments.device, arguments.exact
    )
    own = "" if settings.per_engine == PER_ENGINE else f" --per-engine {settings.per_engine}"
    own += "" if settings.device == "cpu" else f" --device {settings.device}"
    own += " --exact" if settings.exact else ""
    command = f"python benchmarks/lossless_fuzz.py --requests {settings.num_requests} --seed {settings.seed}{own}"
    if arguments.only is None:
        prepare_folder(arguments.output_dir)
    outcome = run_fuzz(settings, arguments.only, is_shown=True)
    for difference in outcome.differences:
        print("\n".join(describe_difference(difference, command)))
    if arguments.only is not None:
        assert outcome.last is not None
        print("\n".join(describe_judged(outcome.last)))
        return 1 if outcome.differences else 0
    shortcomings = outcome.find_shortcomings()
    numbers = "exact" if settings.exact else "float64"
    print_table(outcome, f"Against plain decoding at batch 1, {numbers}, {settings.device}, seed {settings.seed}")
    for line in shortcomings:
        print(f"this run says too little: {line}")
    path = write_results(collect_results(make_rows(outcome, settings)), arguments.output_dir, "lossless-fuzz")
    print(f"{len(outcome.differences)} differences; written to {path}")
    return 1 if outcome.differences or shortcomings else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
