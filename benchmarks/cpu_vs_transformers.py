"""SmolLM2 on a CPU, greedy, float32: Slipstream against transformers, in one run on one machine.

Each engine runs in a process of its own, by turns, several rounds; the best round of each counts, because on shared
machines noise only ever slows down. Prints and writes ratios, which are what carries over to other machines:

- output tokens per second at batch 1 and batch 8, the whole request counted (same prompts, same length);
- the time of a forward pass over four tokens of one request against one token: verification lives on this.

    python benchmarks/cpu_vs_transformers.py [--rounds 3] [--output-len 64]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
PROMPTS = [
    "What is the capital of France?",
    "Write a short story about a robot who learns to paint.",
    "Explain photosynthesis to a child.",
    "List five uses of a brick.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet, and when?",
    "How do I reverse a string in Python?",
]
TARGETS = {"batch 1": 1.3, "batch 8": 1.5}


def run_slipstream(output_len: int) -> dict[str, float]:
    from slipstream import LLM, SamplingParams

    llm = LLM(MODEL, dtype="float32", enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]

    def rate(batch: list[list[int]]) -> float:
        start = time.perf_counter()
        outputs = llm.generate(batch, params)
        assert all(len(output.token_ids) == output_len for output in outputs)
        return len(batch) * output_len / (time.perf_counter() - start)

    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))  # warm-up
    figures = {"batch 1": rate(prompts[:1]), "batch 8": rate(prompts)}
    llm.close()
    return figures


def run_transformers(output_len: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    from slipstream.models.hub import resolve_model
    from slipstream.models.weights import open_checkpoint

    path = resolve_model(MODEL)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    tokenizer = open_checkpoint(path).tokenizer()
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]

    def generate(batch: list[list[int]], num_tokens: int) -> float:
        longest = max(len(prompt) for prompt in batch)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)
        assert out.shape[1] == longest + num_tokens
        return len(batch) * num_tokens / (time.perf_counter() - start)

    generate(prompts, 4)  # warm-up
    return {"batch 1": generate(prompts[:1], output_len), "batch 8": generate(prompts, output_len)}


def run_forward(output_len: int) -> dict[str, float]:
    """Seconds of one forward pass over one and over four tokens of a request with 128 tokens before them."""
    import torch

    from slipstream.attention.backend import AttentionContext
    from slipstream.attention.metadata import CommonAttentionMetadata
    from slipstream.config import EngineOptions
    from slipstream.engine.build import build_engine

    runner = build_engine(EngineOptions(model=MODEL, dtype="float32", max_num_seqs=1)).core.runner
    backend, model = runner._backend, runner._model

    @torch.inference_mode()
    def forward(num_query: int) -> float:
        seq_len = 128 + num_query
        positions = torch.arange(128, seq_len)
        query_start_loc, seq_lens = (torch.tensor(v, dtype=torch.int32) for v in ([0, num_query], [seq_len]))
        start = time.perf_counter()
        common = CommonAttentionMetadata(
            num_reqs=1,
            num_actual_tokens=num_query,
            max_query_len=num_query,
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc.numpy(),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.numpy(),
            block_table=torch.arange(1, 11, dtype=torch.int32)[None],
            slot_mapping=positions + 16,
        )
        context = AttentionContext(backend, backend.build(common), runner.kv_caches, positions, common.slot_mapping)
        hidden = model.forward(torch.full((num_query,), 7, dtype=torch.int32), context)
        model.compute_logits(hidden)
        return time.perf_counter() - start

    times: dict[int, list[float]] = {1: [], 4: []}
    for _ in range(40):
        for num_query, own in times.items():
            own.append(forward(num_query))
    # The lower quartile: what a pass takes when nobody else is on the cores.
    return {str(num_query): sorted(own)[len(own) // 4] for num_query, own in times.items()}


WORKERS = {"slipstream": run_slipstream, "transformers": run_transformers, "forward": run_forward}


def call_worker(name: str, output_len: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", name, "--output-len", str(output_len)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(WORKERS[options.worker](options.output_len)))
        return 0

    from slipstream.commands.results import collect_results, prepare_folder, write_results

    prepare_folder(options.output_dir)
    best: dict[str, dict[str, float]] = {name: {} for name in WORKERS}
    for round_idx in range(options.rounds):
        for name, figures in best.items():
            print(f"round {round_idx + 1} of {options.rounds}: {name}", file=sys.stderr)
            better = min if name == "forward" else max
            for key, value in call_worker(name, options.output_len).items():
                figures[key] = better(figures.get(key, value), value)
    ours, theirs, forward = (best[name] for name in WORKERS)
    ratios = {key: ours[key] / theirs[key] for key in ours} | {"four tokens": forward["4"] / forward["1"]}
    rows: list[dict[str, Any]] = []
    for key in ours:
        batch = int(key.split()[1])
        rows.append({"case": MODEL, "batch": batch, "tok_s": round(ours[key], 2), "engine": "slipstream"})
        rows.append({"case": MODEL, "batch": batch, "tok_s": round(theirs[key], 2), "engine": "transformers"})
    for row in rows:
        row["ratio"] = round(ratios[f"batch {row['batch']}"], 3)
    rows.append({"case": f"{MODEL} forward 4 / 1 tokens", "batch": 1, "tok_s": round(4 / forward["4"], 2)})
    rows[-1] |= {"ratio": round(ratios["four tokens"], 3), "ms": {k: round(1e3 * v, 2) for k, v in forward.items()}}
    path = write_results(collect_results(rows, device="cpu"), options.output_dir, f"{MODEL}-vs-transformers")
    for key in ours:
        rates = f"{ours[key]:6.1f} against {theirs[key]:6.1f} tokens/s"
        print(f"{key}: {rates}, {ratios[key]:.2f} x (at least {TARGETS[key]})")
    four, one = 1e3 * forward["4"], 1e3 * forward["1"]
    print(f"four tokens: {four:.1f} ms against {one:.1f} ms, {ratios['four tokens']:.2f} x (at most 1.5)")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
