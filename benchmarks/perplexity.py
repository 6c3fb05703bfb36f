"""Perplexity of a model by Slipstream on a fixed text, so that two ways of holding its weights can be compared.

The text (`perplexity_text.txt`: prose and some code, written for this) is one prompt, and its tokens' log probabilities
come from `prompt_logprobs`. Small steps and large ones may run other kernels: `--step-tokens 1` reads the prompt token
by token, as decoding would, and 8 as a batch or a check of drafts would. `--engine NAME=VALUE` sets an option of the
engine, such as one that decides how weights are held.

On a CPU `--activations float,24,16` compares how activations meet quantised weights: `float` dequantises the weights
and computes in float32, the others are bits of `SLIPSTREAM_CPU_ACTIVATION_BITS`. Of each it says how many greedy tokens
are those of the first one, and how far the log probabilities are apart.

    python benchmarks/perplexity.py smollm2-135m [file.gguf ...] [--step-tokens 512,1] [--engine dtype=float32]
    python benchmarks/perplexity.py file.gguf --activations float,32,24,16
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cpu_engine import parse_options
from slipstream import LLM, SamplingParams
from slipstream.checkpoints.hub import resolve_model
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results

TEXT = Path(__file__).with_name("perplexity_text.txt")


def perplexity(logprobs: Sequence[float]) -> float:
    """Of tokens with these natural log probabilities; summed exactly, for what is compared is the sixth digit."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


class Judgement(NamedTuple):
    """Of all tokens of the text but the first, which nothing is before."""

    logprobs: list[float]
    greedy_ids: list[int]  # what greedy decoding would have taken in their place


def judge_text(model: str, text: str, step_tokens: int, options: dict[str, Any]) -> Judgement:
    chosen: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": step_tokens, "enable_prefix_caching": False}
    chosen |= {"speculate": "none", **options}
    with LLM(model, **chosen) as llm:
        token_ids = llm.tokenizer.encode(text)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        output = llm.generate([token_ids], params)[0]
    if output.error is not None or output.prompt_logprobs is None:
        raise SystemExit(f"{model}: {output.error or 'no log probabilities came'}")
    pairs = [(id_, own) for id_, own in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True) if own is not None]
    likeliest = [max(own, key=lambda candidate: own[candidate].logprob) for _, own in pairs]
    return Judgement([own[token_id].logprob for token_id, own in pairs], likeliest)


def use_activations(name: str) -> dict[str, Any]:
    """The engine's options; a number of bits goes into the environment."""
    os.environ["SLIPSTREAM_CPU_ACTIVATION_BITS"] = "" if name == "float" else name
    return {"weight_format": "float"} if name == "float" else {}


def compare(found: Judgement, first: Judgement) -> Row:
    same = sum(a == b for a, b in zip(found.greedy_ids, first.greedy_ids, strict=True))
    apart = [abs(a - b) for a, b in zip(found.logprobs, first.logprobs, strict=True)]
    ratio = perplexity(found.logprobs) / perplexity(first.logprobs)
    return {
        "same_greedy_tokens": same,
        "perplexity_ratio": round(ratio, 9),
        "mean_logprob_distance": float(f"{math.fsum(apart) / len(apart):.3g}"),
        "max_logprob_distance": float(f"{max(apart):.3g}"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"], help="GGUF files, folders or aliases")
    parser.add_argument("--step-tokens", default="512", help="tokens in one step; several are measured in turn")
    parser.add_argument("--activations", default="", help="on a CPU: some of float, 32, 24 and 16")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="an option of Slipstream's")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    text, own = arguments.text.read_text(encoding="utf-8"), parse_options(arguments.engine)
    rows: list[Row] = []
    for model in arguments.models:
        first: Judgement | None = None
        ways = [
            (name, int(step)) for name in arguments.activations.split(",") for step in arguments.step_tokens.split(",")
        ]
        for activations, step_tokens in ways:
            begun = time.perf_counter()
            options = {"device": arguments.device, **own, **(use_activations(activations) if activations else {})}
            found = judge_text(model, text, step_tokens, options)
            first = first or found
            row: Row = {"case": resolve_model(model).name, "batch": 1, "text": arguments.text.name}
            row |= {"step_tokens": step_tokens, "num_tokens": len(found.logprobs), "engine_options": own}
            row |= {"activations": activations or None, "perplexity": round(perplexity(found.logprobs), 6)}
            row |= {**compare(found, first), "seconds": round(time.perf_counter() - begun, 1)}
            rows.append(row)
            steps = f"{row['case']}{f', {activations}' if activations else ''}, steps of {step_tokens}"
            same = f"{row['same_greedy_tokens']} of {row['num_tokens']} greedy tokens as the first"
            print(f"{steps}: perplexity {row['perplexity']:.6f}, {same} ({row['seconds']} s)", flush=True)
    path = write_results(collect_results(rows, device=arguments.device), arguments.output_dir, "perplexity")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
