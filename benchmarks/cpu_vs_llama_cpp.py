"""GGUF files on a CPU: Slipstream against llama.cpp, both on the same file, in alternating turns of one run.

For each file: a prompt of 256 tokens, 64 tokens decoded after an empty context (both as `llama-bench -p 256 -n 64`),
and eight requests that decode together after 256 tokens each (`llama-batched-bench`). Also the memory of Slipstream's
process, and how soon a new `slipstream generate` says its first token, the file already in the page cache.

Speculation is measured against the same engine's plain decoding, on questions that are answered to their end: the head
that comes with a model, a smaller file that drafts for the largest one on requests for code (`--draft-model`), and
n-grams on requests to change code. llama.cpp does the same where it can.

A measurement during which other processes used a tenth of the cores is repeated, at most three times; each row says
how much they used in the worst measurement that was kept (`others_share`).

llama.cpp is built once, for this machine, from a source package whose version is pinned (`llama_cpp_build.py`). Where
that cannot be done one line says why, and Slipstream is measured alone. How Slipstream holds the weights is its own
business; `--engine NAME=VALUE` sets an option of it.

    python benchmarks/cpu_vs_llama_cpp.py smollm2-135m small.gguf large.gguf --draft-model small.gguf
    python benchmarks/cpu_vs_llama_cpp.py small.gguf --cases prompt,decode --turns 9
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from code_prompts import EDIT, WRITE
from cpu_engine import Engine, parse_options
from cpu_vs_llama_cpp_rows import Row, Texts, Turns, memory_fields, rate_row, speculation_row, tables
from llama_cpp_build import NAME, UnavailableError, find_or_build
from llama_cpp_tools import Generated, LlamaCpp, OutputError
from quiet import Quiet
from slipstream.checkpoints.hub import resolve_model, shipped_head
from slipstream.commands.results import collect_results, prepare_folder, write_results

CASES = ("prompt", "decode", "batch", "start", "head", "draft", "ngram")
PROMPT_LEN, OUTPUT_LEN, BATCH = 256, 64, 8
Work = tuple[str, int, int, int]  # phase, batch, tokens before, tokens out
# Of llama.cpp's methods without a draft model the one that looks tokens up in the text, as Slipstream's n-grams do.
THEIR_NGRAMS = ["--spec-type", "ngram-simple"]
THEIR_PAIR = ["--spec-type", "draft-simple"]


class Benchmark:
    def __init__(self, arguments: argparse.Namespace, theirs: LlamaCpp | None) -> None:
        self._arguments, self._theirs = arguments, theirs
        self._own = parse_options(arguments.engine)
        self._quiet = Quiet(arguments.max_busy, arguments.tries)
        self.rows: list[Row] = []

    def _engine(self, model: str, **options: Any) -> Engine:
        return Engine({"model": model, **self._own, **options}, self._arguments.threads)

    def _keep(self, row: Row) -> None:
        row = row | {"threads": self._arguments.threads, "engine_options": self._own}
        self.rows.append(row | {"llama_cpp": NAME if self._theirs else None})

    def rates(self, model: str) -> None:
        """The three kinds of work, each in turns, and the memory of the process that did them."""
        path, cases = resolve_model(model), self._arguments.cases
        engine = self._engine(model, max_num_seqs=BATCH, max_model_len=PROMPT_LEN + OUTPUT_LEN + 1)
        all_work: dict[str, Work] = {
            "prompt": ("prompt", 1, PROMPT_LEN, 0),
            "decode": ("decode", 1, 0, OUTPUT_LEN),
            "batch": ("decode", BATCH, PROMPT_LEN, OUTPUT_LEN),
        }
        file_bytes, cache_bytes = path.stat().st_size, engine.ask("cache")["cache_bytes"]
        try:
            for case in [case for case in all_work if case in cases]:
                phase, batch, context, output_len = work = all_work[case]
                turns = self._turns(engine, path, work)
                others = {"context_tokens": context, "output_tokens": output_len, **self._busy()}
                memory = memory_fields(
                    engine.ask("memory"), cache_bytes, file_bytes, engine.ready["without_model_bytes"]
                )
                self._keep(rate_row(path.name, batch, phase, turns, **others) | memory)
        finally:
            engine.close()

    def _turns(self, engine: Engine, path: Path, work: Work) -> Turns:
        turns, self._quiet.shares = Turns(), []
        self._our_rate(engine, *work)  # llama.cpp's tools warm up themselves
        for turn in range(self._arguments.turns):
            turns.ours.append(self._quiet(partial(self._our_rate, engine, *work)))
            if self._theirs is not None:
                turns.theirs.append(self._quiet(partial(self._their_rate, self._theirs, path, *work)))
            rates = " and ".join(f"{rates[-1]:.1f}" for rates in (turns.ours, turns.theirs) if rates)
            shares = " and ".join(f"{share:.0%}" for share in self._quiet.shares[-1 - bool(turns.theirs) :])
            line = f"{path.name}, {work[0]}, batch {work[1]}, turn {turn + 1}: {rates} tokens/s, others used {shares}"
            print(line, file=sys.stderr, flush=True)
        return turns

    def _our_rate(self, engine: Engine, phase: str, batch: int, context: int, output_len: int) -> float:
        if phase == "prompt":
            return float(engine.ask("prompt", length=context)["tok_s"])
        # Without a prompt there is nothing to decode from: one token replaces it.
        return float(engine.ask("decode", batch=batch, context=max(1, context), output_len=output_len)["tok_s"])

    def _their_rate(self, theirs: LlamaCpp, path: Path, phase: str, batch: int, context: int, output_len: int) -> float:
        if batch > 1:
            return theirs.batched(path, batch, context, output_len)
        return theirs.bench(path, context, output_len).tok_s

    def start(self, model: str) -> None:
        """The first start leaves the file in the page cache, and whatever Slipstream keeps for the next one."""
        first_token_s(model, self._arguments)
        self._quiet.shares = []
        seconds = [self._quiet(partial(first_token_s, model, self._arguments)) for _ in range(self._arguments.turns)]
        times = {"first_token_s": round(median(seconds), 2), "first_token_s_runs": [round(each, 2) for each in seconds]}
        self._keep({"case": resolve_model(model).name, "batch": 1, "phase": "start", **times, **self._busy()})

    def speculation(self, model: str, name: str, questions: tuple[str, ...], drafting: dict[str, Any]) -> None:
        """Each question goes to all engines before the next one does."""
        path, arguments = resolve_model(model), self._arguments
        questions = questions[: arguments.questions]
        length = {"max_num_seqs": 1, "max_model_len": 2048}
        plain, drafted = self._engine(model, **length), self._engine(model, **length, **drafting)
        texts = [Texts() for _ in range(4)]
        self._quiet.shares = []
        try:
            chats = [plain.ask("chat", text=question)["text"] for question in questions]
            for engine in (plain, drafted):
                engine.ask("answer", text=questions[0], output_len=32)
            for _ in range(arguments.speculation_turns):
                turn: list[list[Row]] = [[] for _ in texts]
                for question, chat in zip(questions, chats, strict=True):
                    for own, engine in zip(turn, (plain, drafted), strict=False):
                        answer = partial(engine.ask, "answer", text=question, output_len=arguments.answer_len)
                        own.append(self._quiet(answer))
                    for own, generate in zip(turn[2:], self._their_texts(path, chat, drafting), strict=False):
                        own.append(self._quiet(generate)._asdict())
                for own, kept in zip(turn, texts, strict=True):
                    if own:
                        kept.add(own)
        finally:
            plain.close()
            drafted.close()
        theirs = texts[2:] if all(kept.rates for kept in texts[2:]) else [None, None]
        others = {"answer_len": arguments.answer_len, **self._busy()}
        self._keep(speculation_row(f"{path.name}+{name}", texts[0], texts[1], *theirs, **others))

    def _their_texts(self, path: Path, chat: str, drafting: dict[str, Any]) -> list[Callable[[], Generated]]:
        """Without drafts and with them; nothing for a head, which is in no format of theirs."""
        if self._theirs is None or drafting["speculate"] == "eagle3":
            return []
        options = [*THEIR_PAIR, "-md", drafting["draft_model"]] if "draft_model" in drafting else THEIR_NGRAMS
        length = self._arguments.answer_len
        return [
            partial(self._theirs.complete, path, chat, length),
            partial(self._theirs.speculate, path, chat, length, options),
        ]

    def _busy(self) -> Row:
        """The share of the cores that others used, in the worst measurement of those that were kept."""
        return {"others_share": round(max(self._quiet.shares, default=0.0), 3)}

    def run(self) -> None:
        arguments, cases = self._arguments, self._arguments.cases
        for model in arguments.files:
            if {"prompt", "decode", "batch"} & set(cases):
                self.rates(model)
            if "start" in cases:
                self.start(model)
            if "head" in cases and shipped_head(model) is not None:
                from speculation import QUESTIONS

                self.speculation(model, "head-chat", QUESTIONS[:8], {"speculate": "eagle3"})
        largest = max(arguments.files, key=lambda model: resolve_model(model).stat().st_size)
        if "draft" in cases and arguments.draft_model is not None:
            pair = {"speculate": "draft_model", "draft_model": str(resolve_model(arguments.draft_model))}
            self.speculation(largest, "draft-code", WRITE, pair)
        if "ngram" in cases:
            self.speculation(largest, "ngram-code-edit", EDIT, {"speculate": "ngram"})


def first_token_s(model: str, arguments: argparse.Namespace) -> float:
    """From the start of a process to the first byte of its answer."""
    command = [sys.executable, "-m", "slipstream", "generate", "Name a colour.", "--model", model, "--max-tokens", "1"]
    for pair in arguments.engine:
        name, _, value = pair.partition("=")
        command += [f"--{name.replace('_', '-')}", value]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    pipe = subprocess.PIPE
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, bufsize=0) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        seconds = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode or not byte:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")
    return seconds


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=["smollm2-135m"], help="GGUF files, or aliases of such")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--draft-model", help="a GGUF file that drafts for the largest of the files")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--speculation-turns", type=int, default=3)
    parser.add_argument("--questions", type=int, help="at most so many, of each kind")
    parser.add_argument("--answer-len", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-busy", type=float, default=0.1, help="share of the cores that others may take")
    parser.add_argument("--tries", type=int, default=3, help="of a measurement during which they used more")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="an option of Slipstream's")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    arguments.cases = arguments.cases.split(",")
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if min(arguments.turns, arguments.speculation_turns, arguments.threads, arguments.tries) < 1:
        parser.error("--turns, --speculation-turns, --threads and --tries must be at least 1")
    return arguments


def main() -> int:
    arguments = read_arguments()
    prepare_folder(arguments.output_dir)
    theirs = None
    try:
        theirs = LlamaCpp(find_or_build(), arguments.threads)
    except UnavailableError as error:
        print(f"llama.cpp is left out: {error}", file=sys.stderr, flush=True)
    benchmark = Benchmark(arguments, theirs)
    failure = None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, where a time limit ends it
    try:
        benchmark.run()
    except (OutputError, KeyboardInterrupt) as error:  # what was measured before is kept
        failure = error
    if benchmark.rows:
        results = collect_results(benchmark.rows, device="cpu")
        console = Console(width=150)
        for table in tables(benchmark.rows, f"{results.hardware}, {arguments.threads} threads"):
            console.print(table)
        print(f"llama.cpp: {NAME if theirs else 'left out'}")
        print(f"written to {write_results(results, arguments.output_dir, 'cpu-vs-llama-cpp')}")
    if failure is not None:
        print(f"error: {str(failure) or 'interrupted'}", file=sys.stderr)
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
