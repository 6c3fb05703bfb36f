"""SmolLM2 on a CPU, greedy, float32: Slipstream against transformers, in one run on one machine.

Each engine lives in a process of its own. They take turns of a few seconds, and each turn of one is compared with the
turn of the other beside it: the speed of a shared machine drifts over minutes, a ratio of neighbours does not. Prints
and writes the median ratios, which are what carries over to other machines:

- output tokens per second at batch 1 and batch 8, the whole request counted (same prompts, same length);
- the time of a forward pass over four tokens of one request against one token: verification lives on this.

    python benchmarks/cpu_vs_transformers.py [--rounds 7] [--output-len 64]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
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
TARGETS = {1: 1.3, 8: 1.5}  # by batch size


def make_slipstream() -> Callable[[int, int], float]:
    """A function of batch and output length that generates and returns output tokens per second."""
    from slipstream import LLM, SamplingParams

    llm = LLM(MODEL, dtype="float32", enable_prefix_caching=False, speculate="none")
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]

    def generate(batch: int, output_len: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(prompts[:batch], params)
        assert all(len(output.token_ids) == output_len for output in outputs)
        return batch * output_len / (time.perf_counter() - start)

    return generate


def make_transformers() -> Callable[[int, int], float]:
    import torch
    from transformers import AutoModelForCausalLM

    from slipstream.checkpoints.checkpoint import open_checkpoint
    from slipstream.checkpoints.hub import resolve_model

    path = resolve_model(MODEL)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    tokenizer = open_checkpoint(path).tokenizer()
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]

    def generate(batch: int, output_len: int) -> float:
        chosen = prompts[:batch]
        longest = max(len(prompt) for prompt in chosen)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in chosen])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in chosen])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=output_len)
        assert out.shape[1] == longest + output_len
        return batch * output_len / (time.perf_counter() - start)

    return generate


def make_forward() -> Callable[[int, int], float]:
    """Seconds of one forward pass over one and over four tokens of a request with 128 tokens before them."""
    import torch

    from slipstream.attention.context import StepTokens
    from slipstream.attention.metadata import CommonAttentionMetadata
    from slipstream.config import EngineOptions
    from slipstream.engine.build import build_engine

    runner = build_engine(EngineOptions(model=MODEL, dtype="float32", max_num_seqs=1)).core.runner
    model = runner.program.model

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
        context = runner.caches.begin(StepTokens(positions, common.slot_mapping, common))
        hidden = model.forward(torch.full((num_query,), 7, dtype=torch.int32), context)
        model.compute_logits(hidden)
        return time.perf_counter() - start

    return lambda num_query, _: forward(num_query)


WORKERS = {"slipstream": make_slipstream, "transformers": make_transformers, "forward": make_forward}


def serve(name: str) -> None:
    """The child's side: make the engine, then answer lines ``batch output_len`` with a number each."""
    run = WORKERS[name]()
    for line in sys.stdin:
        batch, output_len = map(int, line.split())
        print(run(batch, output_len), flush=True)


class Worker:
    """The parent's side."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, "--worker", name]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def __call__(self, batch: int, output_len: int) -> float:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(f"{batch} {output_len}\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.worker)
        return 0

    from slipstream.commands.results import collect_results, prepare_folder, write_results

    prepare_folder(options.output_dir)
    rows: list[dict[str, Any]] = []
    ours, theirs = Worker("slipstream"), Worker("transformers")
    for batch, target in TARGETS.items():
        pairs = []
        for round_idx in range(-1, options.rounds):  # the first is a warm-up
            pair = ours(batch, options.output_len), theirs(batch, options.output_len)
            print(f"batch {batch}, round {round_idx + 1}: {pair[0]:.1f}, {pair[1]:.1f} tokens/s", file=sys.stderr)
            if round_idx >= 0:
                pairs.append(pair)
        ratio = median(own / other for own, other in pairs)
        for engine, figures in zip(("slipstream", "transformers"), zip(*pairs, strict=True), strict=True):
            rows.append({"case": MODEL, "batch": batch, "engine": engine, "tok_s": round(median(figures), 2)})
            rows[-1] |= {"ratio": round(ratio, 3), "tok_s_runs": [round(figure, 2) for figure in figures]}
            rows[-1] |= {"output_len": options.output_len, "transformers": importlib.metadata.version("transformers")}
        own, other = rows[-2]["tok_s"], rows[-1]["tok_s"]
        print(f"batch {batch}: {own} against {other} tokens/s, {ratio:.2f} x (at least {target})", flush=True)
    ours.close()
    theirs.close()

    forward = Worker("forward")
    times = [(forward(1, 0), forward(4, 0)) for _ in range(60)][10:]
    forward.close()
    ratio, one, four = median(b / a for a, b in times), *(1e3 * median(column) for column in zip(*times, strict=True))
    rows.append({"case": f"{MODEL} forward of 4 tokens", "batch": 1, "tok_s": round(4e3 / four, 2)})
    rows[-1] |= {"ratio": round(ratio, 3), "ms_of_1": round(one, 2), "ms_of_4": round(four, 2)}
    print(f"four tokens: {four:.1f} ms against {one:.1f} ms for one, {ratio:.2f} x (at most 1.5)")
    path = write_results(collect_results(rows, device="cpu"), options.output_dir, f"{MODEL}-vs-transformers")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
