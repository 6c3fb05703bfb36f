"""Decoding with drafts against plain decoding, on chat prompts and on prompts that ask to repeat a given text.

Greedy, 256 output tokens, end of sequence ignored, prefix caching off, the rate of the decode part: the workload of
`decode_throughput.py` with prompts that say something. A model that must continue after its end repeats itself, which
is easy to draft; so chat prompts are also answered to their end, and the rate is then all tokens over the time from the
first to the last. Both engines live in one process and take turns, for a machine is not as fast at one time as at
another, and what is asked is a ratio. Shown is the best of three, and beside its ratio that of the medians, for a host
that is too slow at times is not seen in the best. Tokens are compared: on a GPU a tie may be decided the other way, for
sums over five tokens are not rounded as sums over one.

    python benchmarks/speculation.py [--model FILE] [--method ngram] [--k 4] [--draft-model FILE] [--batch 1,8,32]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.commands.measure import BatchRun, decode_rate, in_turns, run_batch, wait_for_graphs
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.engine.client import EngineClient
from slipstream.text.tokenizer import Tokenizer

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain to a child why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "How do I boil an egg so that the yolk stays soft?",
    "Give me three ideas for a weekend in the mountains.",
    "What is the difference between a virus and a bacterium?",
    "Summarise the story of Romeo and Juliet in five sentences.",
    "My plant has yellow leaves. What could be wrong?",
    "Write a polite letter to my landlord about a broken window.",
    "Which planets have rings, and why?",
    "How does a bicycle stay upright?",
    "Tell me a joke about a cat and a computer.",
    "What should I pack for a week at the sea?",
    "Explain compound interest with an example.",
    "Why do leaves change colour in autumn?",
    "Describe the taste of an apple to someone who never had one.",
)
SENTENCES = (
    "The ferry leaves the harbour at seven in the morning and returns shortly before dark.",
    "Nobody on the island remembers who built the stone wall behind the church.",
    "Every spring the river carries sand down from the hills and leaves it at the bend.",
    "Her grandfather kept bees in wooden boxes painted blue, green and white.",
    "A letter arrived on Tuesday with a stamp that showed a sailing ship.",
    "The baker sells dark bread with walnuts, but only when his daughter visits.",
    "In the evening the children count the lights of the boats until they fall asleep.",
    "The old clock in the station has been four minutes slow for as long as anyone can say.",
    "They planted two rows of apple trees along the road to the quarry.",
    "When the wind turns north, the smell of the pine forest reaches the market square.",
    "The teacher wrote the names of seven rivers on the board and asked for an eighth.",
    "A grey cat sleeps on the counter of the bookshop from noon until three.",
    "The bridge was closed for repairs, so the band had to walk around the lake.",
    "She measured the snow every day and wrote the numbers in a yellow notebook.",
    "At the end of the lane stands a house with a round window and no door.",
    "The museum shows a collection of keys, and none of them fits any lock in town.",
)


KINDS = ("chat", "chat-to-the-end", "repeat")


def texts(kind: str, count: int) -> list[str]:
    if kind.startswith("chat"):
        tones = ("", " Please answer briefly.", " Take your time.", " Use simple words.")
        asked = [question + tone for tone in tones for question in QUESTIONS]
        return [asked[i % len(asked)] for i in range(count)]
    made = []
    for i in range(count):
        text = " ".join(random.Random(i).sample(SENTENCES, len(SENTENCES)))
        made.append(f"Repeat the following text exactly, word for word, from the beginning to the end:\n\n{text}")
    return made


def encode(tokenizer: Tokenizer, asked: Sequence[str]) -> list[list[int]]:
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]


def rate(kind: str, run: BatchRun) -> float:
    if kind != "chat-to-the-end":
        return decode_rate(run.arrivals)
    first, last = run.arrivals[0], run.arrivals[-1]
    return (sum(arrival.num_tokens for arrival in run.arrivals) - first.num_tokens) / (last.time - first.time)


class Runs(NamedTuple):
    """The fastest one, and the rates of all."""

    best: BatchRun
    rates: list[float]


class Contestant:
    """An engine, and its runs of each kind and batch."""

    def __init__(self, name: str, options: EngineOptions) -> None:
        self._name = name
        self._client = EngineClient.in_thread(lambda: build_engine(options))
        self.close = self._client.close
        self.runs: dict[tuple[str, int], Runs] = {}

    def wait(self) -> None:
        wait_for_graphs(self._client)

    def run(self, kind: str, asked: list[list[int]], output_len: int) -> BatchRun:
        return run_batch(self._client, asked, output_len, ignore_eos=kind != "chat-to-the-end")

    def keep(self, kind: str, batch: int, runs: Sequence[BatchRun]) -> None:
        """The first one was for warming up."""
        rates = [rate(kind, run) for run in runs[1:]]
        self.runs[kind, batch] = Runs(runs[1:][rates.index(max(rates))], rates)
        counted = zip(rates, runs[1:], strict=True)
        figures = ", ".join(f"{speed:,.0f} ({run.drafts.num_drafts} drafts)" for speed, run in counted)
        print(f"{self._name}, {kind}, batch {batch}: {figures} tokens/s", file=sys.stderr, flush=True)


def compete(
    engines: dict[str, EngineOptions],
    prompts: dict[str, list[list[int]]],
    batches: Sequence[int],
    output_len: int,
    repeat: int,
) -> list[dict[tuple[str, int], Runs]]:
    """Of each engine. All of them take turns."""
    contestants: list[Contestant] = []
    try:
        for name, options in engines.items():
            contestants.append(Contestant(name, options))
            contestants[-1].wait()
        for kind, asked in prompts.items():
            for batch in batches:
                each = [partial(contestant.run, kind, asked[:batch], output_len) for contestant in contestants]
                for contestant, runs in zip(contestants, in_turns(repeat + 1, each), strict=True):
                    contestant.keep(kind, batch, runs)
    finally:
        for contestant in contestants:
            contestant.close()
    return [contestant.runs for contestant in contestants]


def row(kind: str, batch: int, plain: Runs, drafted: Runs, arguments: argparse.Namespace) -> dict[str, Any]:
    drafts, before, after = drafted.best.drafts, max(plain.rates), max(drafted.rates)
    same = sum(a == b for a, b in zip(plain.best.token_ids, drafted.best.token_ids, strict=True))
    return {
        "case": f"{Path(arguments.model).stem}+{arguments.method}-{kind}",
        "batch": batch,
        "tok_s": round(after, 1),
        "plain_tok_s": round(before, 1),
        "ratio": round(after / before, 3),
        "ratio_of_medians": round(statistics.median(drafted.rates) / statistics.median(plain.rates), 3),
        "k": arguments.k or "adaptive",
        "mean_length": round(drafted.best.tokens_a_step, 3),
        "drafts": drafts.num_drafts,
        "acceptance_by_position": [round(rate, 3) for rate in drafts.acceptance_at],
        "same_texts": same,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="ngram", choices=("ngram", "draft_model"))
    parser.add_argument("--draft-model")
    parser.add_argument("--k", type=int, help="as many drafts in every step; otherwise the number adapts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    batches = [int(size) for size in arguments.batch.split(",")]
    tokenizer = open_checkpoint(resolve_model(arguments.model)).tokenizer()
    prompts = {kind: encode(tokenizer, texts(kind, max(batches))) for kind in arguments.kinds.split(",")}
    plain_options = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        enable_prefix_caching=False,
        max_num_seqs=max(batches),
        max_model_len=max(len(prompt) for asked in prompts.values() for prompt in asked) + arguments.output_len,
        seed=0,
    )
    drafting = {"speculate": arguments.method, "k": arguments.k, "draft_model": arguments.draft_model}
    draft_options = EngineOptions(**{**vars(plain_options), **drafting})
    engines = {"plain": plain_options, arguments.method: draft_options}
    plain, drafted = compete(engines, prompts, batches, arguments.output_len, arguments.repeat)
    rows = [row(*key, plain[key], drafted[key], arguments) for key in plain]
    results = collect_results(rows, device="cuda" if torch.cuda.is_available() else "cpu")
    table = Table("case", title=f"output tokens per second, {results.hardware}, k = {arguments.k or 'adaptive'}")
    for name in ("batch", "plain", "with drafts", "ratio", "of medians", "tokens a step", "same texts"):
        table.add_column(name, justify="right")
    for r in rows:
        rates = (f"{r['plain_tok_s']:,.0f}", f"{r['tok_s']:,.0f}", f"{r['ratio']:.2f}", f"{r['ratio_of_medians']:.2f}")
        same = f"{r['same_texts']} of {r['batch']}"
        table.add_row(r["case"], str(r["batch"]), *rates, f"{r['mean_length']:.2f}", same)
    path = write_results(results, arguments.output_dir, f"speculation-{arguments.method}")
    Console(width=120).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
