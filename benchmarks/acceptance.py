"""How many drafts are accepted by `match` and by `rejection` with a real pair of models, greedy and at temperature 1.

The drafter is made from the target: its weights rounded to a few bits, or some of its layers left out. Such pairs are
what users without a smaller sibling of their model have; they cost no training.

    python benchmarks/acceptance.py [--model FILE] [--bits 3 | --skip 12-17] [--k 4] [--prompts 32]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.speculation import encode, texts
from slipstream.checkpoints.checkpoint import Checkpoint, open_checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.llm import LLM
from slipstream.output import DraftStats
from slipstream.sampling_params import SamplingParams

_GROUP = 32  # weights that share a scale


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Each group of a row's weights to as many evenly spaced levels as the bits can tell apart."""
    groups = weight.float().reshape(-1, _GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
    return (((groups - low) / step).round() * step + low).reshape(weight.shape).to(weight.dtype)


def drafter_tensors(checkpoint: Checkpoint, bits: int | None, skipped: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    kept = [i for i in range(checkpoint.config["num_hidden_layers"]) if i not in skipped]
    for name, tensor in checkpoint.tensors():
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if layer and int(layer[1]) in skipped:
            continue
        if layer:
            name = f"model.layers.{kept.index(int(layer[1]))}.{layer[2]}"
        if layer and bits and tensor.dim() == 2 and tensor.shape[1] % _GROUP == 0:
            tensor = rounded(tensor, bits)
        yield name, tensor.contiguous().clone()


def write_drafter(checkpoint: Checkpoint, bits: int | None, skipped: set[int], folder: Path) -> Path:
    save_file(dict(drafter_tensors(checkpoint, bits, skipped)), folder / "model.safetensors")
    num_layers = checkpoint.config["num_hidden_layers"] - len(skipped)
    (folder / "config.json").write_text(json.dumps({**checkpoint.config, "num_hidden_layers": num_layers}))
    checkpoint.tokenizer().save(folder / "tokenizer.json")
    return folder


def measure(
    options: dict[str, Any], prompts: list[list[int]], temperature: float, max_tokens: int
) -> tuple[DraftStats, int]:
    with LLM(**options) as llm:
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(prompts))]
        outputs = llm.generate(prompts, params)
        drafts = llm.stats.drafts
    return drafts, sum(len(output.token_ids) for output in outputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--skip", help="layers left out, such as 12-17; the weights are then as they are")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    checkpoint = open_checkpoint(resolve_model(arguments.model))
    skipped: set[int] = set()
    if arguments.skip:
        first, _, last = arguments.skip.partition("-")
        skipped = set(range(int(first), int(last or first) + 1))
    name = f"without layers {arguments.skip}" if skipped else f"{arguments.bits} bits"
    prompts = encode(checkpoint.tokenizer(), texts("chat", arguments.prompts))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_drafter(checkpoint, None if skipped else arguments.bits, skipped, Path(folder))
        for temperature in (0.0, 1.0):
            for verify in ("match", "rejection"):
                speculative = {"method": "draft_model", "model": folder, "num_speculative_tokens": arguments.k}
                options = {"model": arguments.model, "speculative_config": {**speculative, "verify": verify}}
                stats, num_tokens = measure(options, prompts, temperature, arguments.max_tokens)
                rows.append(
                    {
                        "case": f"{Path(arguments.model).stem}, drafter: {name}, {verify}",
                        "batch": len(prompts),
                        "tok_s": 0.0,
                        "temperature": temperature,
                        "k": arguments.k,
                        "num_tokens": num_tokens,
                        **stats.as_dict(),
                    }
                )
    results = collect_results(rows, device="cuda" if torch.cuda.is_available() else "cpu")
    table = Table("drafter and check", title=f"acceptance, k = {arguments.k}, {results.hardware}")
    for column in ("temperature", "drafts", "accepted", "share", "tokens a step", "by position"):
        table.add_column(column, justify="right")
    for row in rows:
        share = f"{row['accepted'] / max(1, row['drafts']):.3f}"
        rates = " ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"])
        figures = (str(row["drafts"]), str(row["accepted"]), share, f"{row['mean_length']:.2f}", rates)
        table.add_row(row["case"], f"{row['temperature']:g}", *figures)
    path = write_results(results, arguments.output_dir, "acceptance")
    Console(width=150).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
