"""Perplexity of a model by Slipstream on a fixed text, so that two ways of holding its weights can be compared.

The text (`perplexity_text.txt`: prose and some code, written for this) is one prompt, and its tokens' log probabilities
come from `prompt_logprobs`. Small steps and large ones may run other kernels: `--step-tokens 1` reads the prompt token
by token, as decoding would, and 8 as a batch or a check of drafts would. `--engine NAME=VALUE` sets an option of the
engine, such as one that decides how weights are held.

    python benchmarks/perplexity.py smollm2-135m [file.gguf ...] [--step-tokens 512,1] [--engine dtype=float32]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpu_engine import parse_options
from slipstream import LLM, SamplingParams
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.models.hub import resolve_model

TEXT = Path(__file__).with_name("perplexity_text.txt")


def perplexity(logprobs: Sequence[float]) -> float:
    """Of tokens with these natural log probabilities; summed exactly, for what is compared is the sixth digit."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def token_logprobs(model: str, text: str, step_tokens: int, options: dict[str, Any]) -> list[float]:
    """Of all tokens of the text but the first, which nothing is before."""
    chosen: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": step_tokens, "enable_prefix_caching": False}
    chosen |= {"speculate": "none", **options}
    with LLM(model, **chosen) as llm:
        token_ids = llm.tokenizer.encode(text)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        output = llm.generate([token_ids], params)[0]
    if output.error is not None or output.prompt_logprobs is None:
        raise SystemExit(f"{model}: {output.error or 'no log probabilities came'}")
    pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [entry[token_id].logprob for token_id, entry in pairs if entry is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"], help="GGUF files, folders or aliases")
    parser.add_argument("--step-tokens", default="512", help="tokens in one step; several are measured in turn")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="an option of Slipstream's")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    text, own = arguments.text.read_text(encoding="utf-8"), parse_options(arguments.engine)
    rows: list[Row] = []
    for model in arguments.models:
        for step_tokens in map(int, arguments.step_tokens.split(",")):
            begun = time.perf_counter()
            found = token_logprobs(model, text, step_tokens, {"device": arguments.device, **own})
            row: Row = {"case": resolve_model(model).name, "batch": 1, "text": arguments.text.name}
            row |= {"step_tokens": step_tokens, "num_tokens": len(found), "engine_options": own}
            row |= {"perplexity": round(perplexity(found), 6), "seconds": round(time.perf_counter() - begun, 1)}
            rows.append(row)
            steps = f"steps of {step_tokens}, {len(found)} tokens"
            print(f"{row['case']}, {steps}: perplexity {row['perplexity']:.6f} ({row['seconds']} s)", flush=True)
    path = write_results(collect_results(rows, device=arguments.device), arguments.output_dir, "perplexity")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
