"""``--exact``: one request, one text, to the bit. Whether it holds, and what it costs.

Four parts, each of which may run by itself:

- kernels: rows of every product, of experts and of attention, in batches of all sizes, against the same rows among
  others; on a GPU also a planted fault, which must be found;
- texts: Spec-Bench, plain and with drafts, every text against the plain run's at the smallest batch;
- settings: 64 of the prompts under every combination of chunks, prefix cache, steps in flight, preemption and graphs,
  tokens and log probabilities against each prompt by itself;
- cost: an exact engine and a default one take turns; ratios of their rates.

    python benchmarks/exact.py --questions question.jsonl --head FOLDER
    python benchmarks/exact.py --parts kernels,cost --shapes llama-3.1-8b,qwen3-30b-a3b

The exit status is 1 if anything differs that must not. The results have the cases ``exact-kernels``,
``exact-spec-bench``, ``exact-settings`` and ``exact-cost``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import spec_bench
from exact_cost import compare_cost
from exact_kernels import MODELS, check_kernels
from exact_texts import ExactBench, compare_settings, compare_texts
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.device import choose_device
from slipstream.errors import SlipstreamError
from slipstream.models.shapes import SHAPES
from spec_bench_questions import read_questions

PARTS = ("kernels", "texts", "settings", "cost")
BATCHES = {"smollm2-135m": (1, 8, 32), "llama-3.1-8b": (1, 8, 64), "qwen3-30b-a3b": (1, 8, 64)}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl; for texts and settings")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", help="folder of the EAGLE-3 head; without it only n-grams draft")
    parser.add_argument("--shapes", default="llama-3.1-8b", help="of random weights, for the cost; or none")
    parser.add_argument("--kernel-shapes", default="smollm2-135m,llama-3.1-8b,qwen3-30b-a3b")
    parser.add_argument("--batch", default="1,32", help="requests at a time, of texts")
    parser.add_argument("--cost-batch", help="requests at a time, of the cost; usual ones for each model if unset")
    parser.add_argument("--largest", type=int, default=8192, help="most tokens of a product")
    parser.add_argument("--draws", type=int, default=200, help="batches of attention")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096, help="of texts")
    parser.add_argument("--limit", type=int, help="as many questions of each kind")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args(argv)
    arguments.parts = arguments.parts.split(",")
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]}; {', '.join(PARTS)} are known")
    arguments.shapes = [name for name in arguments.shapes.split(",") if name != "none"]
    arguments.kernel_shapes = arguments.kernel_shapes.split(",")
    for name, known in ((arguments.shapes, SHAPES), (arguments.kernel_shapes, MODELS)):
        if wrong := [one for one in name if one not in known]:
            parser.error(f"unknown shape {wrong[0]}; {', '.join(known)} are known")
    if {"texts", "settings"} & {*arguments.parts} and arguments.questions is None:
        parser.error("texts and settings need --questions")
    return arguments


def run_kernels(arguments: argparse.Namespace, device: torch.device) -> list[Row]:
    rows = []
    for name in arguments.kernel_shapes:
        found = check_kernels(name, device, arguments.largest, arguments.draws)
        for row in found:
            print(f"{row}", file=sys.stderr, flush=True)
        rows += found
    return rows


def run_texts(arguments: argparse.Namespace) -> list[Row]:
    """Both parts that need questions."""
    methods = "ngram" + (",eagle3:4,eagle3" if arguments.head else "")
    given = ["--questions", str(arguments.questions), "--model", arguments.model, "--methods", methods]
    given += ["--batch", arguments.batch, "--output-len", str(arguments.output_len), "--device", arguments.device]
    given += ["--dtype", arguments.dtype, *(["--head", arguments.head] if arguments.head else [])]
    given += ["--max-model-len", str(arguments.max_model_len)]
    given += [] if arguments.limit is None else ["--limit", str(arguments.limit)]
    own = spec_bench.parse(given)
    questions = read_questions(own.questions, own.limit)
    bench = ExactBench(own, questions)
    rows = compare_texts(bench, own) if "texts" in arguments.parts else []
    if "settings" in arguments.parts:
        # In turn from every kind, as many as are asked for.
        mixed = [q for turn in itertools.zip_longest(*questions.values()) for q in turn if q is not None]
        rows += compare_settings(bench, mixed, own)
    return rows


def run_cost(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    lengths = (arguments.prompt_len, arguments.output_len)
    max_len = 8 * arguments.prompt_len + arguments.output_len + 8
    for name, shape in ((spec_bench.model_name(arguments.model), None), *((one, one) for one in arguments.shapes)):
        batches = BATCHES.get(name, (1, 8))
        if arguments.cost_batch:
            batches = tuple(map(int, arguments.cost_batch.split(",")))
        base = EngineOptions(
            model=arguments.model if shape is None else shape,
            device=arguments.device,
            dtype=arguments.dtype,
            enable_prefix_caching=False,
            max_num_seqs=max(8, *batches),
            max_model_len=max_len,
            seed=0,
        )
        rows += compare_cost(base, name, shape, batches, lengths)
        if shape is None and arguments.head:
            drafts = {"method": "eagle3", "num_speculative_tokens": 4, "model": arguments.head, "adaptive": False}
            rows += compare_cost(replace(base, speculative_config=drafts), f"{name}+eagle3", None, batches, lengths)
    return rows


def faults(rows: list[Row]) -> list[Row]:
    """What must be equal and is not, and a planted fault that was not found."""
    found = []
    for row in rows:
        is_planted = row.get("kernel") == "planted cut"
        differs = row.get("differences", 0) or row.get("texts", 0) > row.get("texts_equal", row.get("texts", 0))
        differs = differs or row.get("compared", 0) > row.get("equal", row.get("compared", 0))
        if not row["is_found"] if is_planted else differs:
            found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    device = choose_device(arguments.device)
    prepare_folder(arguments.output_dir)
    rows: list[Row] = []
    path = None
    for part, run in (
        ({"kernels"}, lambda: run_kernels(arguments, torch.device(device))),
        ({"texts", "settings"}, lambda: run_texts(arguments)),
        ({"cost"}, lambda: run_cost(arguments)),
    ):
        if part & {*arguments.parts}:
            rows += run()
            # After each, so that what was measured is kept whatever happens to the next.
            results = collect_results(rows, device=device)
            path = path or write_results(results, arguments.output_dir, "exact")
            path.write_text(results.as_json(), encoding="utf-8")
    wrong = faults(rows)
    for row in wrong:
        print(f"NOT EXACT: {row}")
    for row in rows:
        if row["case"] == "exact-cost":
            print(f"{row['model']}, {row['phase']}, batch {row['batch']}: {row['ratio']:.3f} x the default")
    print(f"{len(wrong)} of {len(rows)} rows show differences; written to {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
