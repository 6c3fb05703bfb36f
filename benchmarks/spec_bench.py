"""Spec-Bench: 480 questions in six kinds, plain and with drafts: how far drafts are right, how fast, the same text.

Each kind of question runs for itself, one request at a time or up to 32 together, prompts included in the time, better
of `--repeat` runs. A second turn is asked behind the answer that the plain run gave to the first, so that all methods
get the same prompts. Accepted length is tokens a step that checks drafts, the target's own included; a step without
drafts counts one. Every text is compared with the plain run's. Where one differs, the plain engine is asked how likely
it found both tokens at the first difference: a near-tie of the precision, or a fault.

    python benchmarks/spec_bench.py --questions question.jsonl [--methods none,ngram,eagle3] [--head FOLDER] [--limit 5]
    python benchmarks/spec_bench.py --questions question.jsonl --temperature 0.7 --batch 1,32 --k 4

The questions are those of Spec-Bench (Xia et al., 2024; Apache-2.0).
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from slipstream.commands.measure import wait_for_graphs
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.engine.client import EngineClient
from slipstream.errors import ConfigError, EngineError
from slipstream.types import RequestOutput, SamplingParams, TokenUpdates

# Kinds as the paper counts them: MT-bench's eight are one.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
OVERALL = "overall"
NEAR_TIE = 0.25  # between two log probabilities, in bfloat16


class Question(NamedTuple):
    kind: str
    turns: tuple[str, ...]


class Answer(NamedTuple):
    prompt: list[int]
    token_ids: list[int]
    text: str


@dataclass
class Run:
    """One method over one kind of questions."""

    answers: list[Answer]
    seconds: float
    num_steps: dict[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def length(self) -> float:
        """Tokens a step of a request. The first token of an answer comes with its prompt, and is left out."""
        num_steps = sum(self.num_steps.values()) - len(self.answers)
        return (self.num_tokens - len(self.answers)) / max(1, num_steps)


def read_questions(path: Path, limit: int | None) -> dict[str, list[Question]]:
    """By kind, in the file's order; the first ``limit`` of each."""
    found: dict[str, list[Question]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the questions: {error}; give Spec-Bench's question.jsonl") from error
    for number, line in enumerate(lines, 1):
        try:
            asked = json.loads(line)
            kind, turns = asked["category"], tuple(map(str, asked["turns"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number} is no question with category and turns") from error
        kind = "mt_bench" if kind in MT_BENCH else kind
        found.setdefault(kind, []).append(Question(kind, turns))
    if not found:
        raise ConfigError(f"{path} has no questions")
    return {kind: asked[:limit] for kind, asked in found.items()}


def generate(client: EngineClient, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Run:
    """All of them; how many run at a time is the engine's limit."""
    requests = [client.prepare(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    place = {request.request_id: i for i, request in enumerate(requests)}
    done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    steps: list[Sequence[str]] = []

    def note(updates: TokenUpdates) -> None:
        steps.append([i for i, ids in zip(updates.request_ids, updates.token_ids, strict=True) if ids])

    outputs: list[RequestOutput | None] = [None] * len(requests)
    start = time.monotonic()
    with client.tapped(note):
        for request in requests:
            client.submit(request, done.put, every_token=False)
        for _ in requests:
            output = done.get()
            if output.error is not None:
                raise EngineError(output.error)
            outputs[place[output.request_id]] = output
        seconds = time.monotonic() - start
    num_steps = dict.fromkeys(place, 0)
    for ids in steps:
        for request_id in ids:
            num_steps[request_id] += 1
    answers = [
        Answer(list(p), list(o.token_ids), o.text) for p, o in zip(prompts, outputs, strict=True) if o is not None
    ]
    return Run(answers, seconds, num_steps)


def joined(runs: Sequence[Run]) -> Run:
    num_steps = {f"{i}-{key}": count for i, run in enumerate(runs) for key, count in run.num_steps.items()}
    return Run([a for run in runs for a in run.answers], sum(run.seconds for run in runs), num_steps)


class Difference(NamedTuple):
    kind: str
    prompt: list[int]
    ours: int  # of the run with drafts
    plain: int


def gap(client: EngineClient, found: Difference) -> float:
    """How far the plain engine finds the two tokens apart, as log probabilities; infinite where one is no candidate."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    request = client.prepare(found.prompt, params)
    done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    client.submit(request, done.put, every_token=False)
    logprobs = (done.get().outputs[0].logprobs or [{}])[0]
    known = {token_id: entry.logprob for token_id, entry in logprobs.items()}
    if found.ours not in known or found.plain not in known:
        return float("inf")
    return abs(known[found.ours] - known[found.plain])


class Bench:
    """One engine after the other over all questions."""

    def __init__(self, arguments: argparse.Namespace, questions: dict[str, list[Question]]) -> None:
        self.arguments, self.questions = arguments, questions
        # First answers of the plain run, which second turns follow in every run; by batch and kind.
        self.first_answers: dict[tuple[int, str], list[str]] = {}

    def options(self, method: str, batch: int) -> EngineOptions:
        arguments = self.arguments
        speculate: dict[str, Any] | None = None
        if method != "none":
            speculate = {"method": method, "num_speculative_tokens": arguments.k or arguments.max_k}
            speculate |= {"adaptive": arguments.k is None}
            speculate |= {"model": arguments.head} if method == "eagle3" and arguments.head else {}
        return EngineOptions(
            model=arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            enable_prefix_caching=False,  # runs are repeated
            max_num_seqs=batch,
            max_model_len=arguments.max_model_len,
            speculative_config=speculate,
            seed=0,
        )

    def params(self, count: int) -> list[SamplingParams]:
        wanted = self.arguments
        return [
            SamplingParams(temperature=wanted.temperature, seed=i, max_tokens=wanted.output_len) for i in range(count)
        ]

    def prompts(self, client: EngineClient, asked: Sequence[Question], turn: int, before: Sequence[str]) -> list[Any]:
        """Token ids of each that fits; a prompt that is too long keeps its end."""
        room = self.arguments.max_model_len - self.arguments.output_len
        made = []
        for question, answer in zip(asked, before, strict=True):
            messages = [{"role": "user", "content": question.turns[0]}]
            if turn:
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": question.turns[1]})
            made.append(client.tokenizer.encode_chat(messages)[-room:])
        return made

    def run_kind(self, client: EngineClient, batch: int, kind: str) -> Run:
        asked = self.questions[kind]
        prompts = self.prompts(client, asked, 0, [""] * len(asked))
        runs = [generate(client, prompts, self.params(len(prompts)))]
        again = [question for question in asked if len(question.turns) > 1]
        if again:
            texts = [answer.text for answer in runs[0].answers]
            firsts = self.first_answers.setdefault((batch, kind), texts)
            kept = [text for question, text in zip(asked, firsts, strict=True) if len(question.turns) > 1]
            prompts = self.prompts(client, again, 1, kept)
            runs.append(generate(client, prompts, self.params(len(prompts))))
        return joined(runs)

    def run_method(self, method: str, batch: int) -> dict[str, Run]:
        client = EngineClient.in_thread(lambda: build_engine(self.options(method, batch)))
        best: dict[str, Run] = {}
        try:
            wait_for_graphs(client)
            for kind in self.questions:
                runs = [self.run_kind(client, batch, kind) for _ in range(self.arguments.repeat)]
                best[kind] = max(runs, key=lambda run: run.rate)
                figures = f"{best[kind].rate:,.0f} tokens/s, {best[kind].length:.2f} a step"
                print(f"{method}, batch {batch}, {kind}: {figures}", file=sys.stderr, flush=True)
        finally:
            client.close()
        return best

    def gaps(self, found: Sequence[Difference], batch: int) -> list[float]:
        client = EngineClient.in_thread(lambda: build_engine(self.options("none", batch)))
        try:
            return [gap(client, one) for one in found]
        finally:
            client.close()


def differences(kind: str, plain: Run, drafted: Run) -> list[Difference]:
    """The first token of each text that is not the plain run's; -1 where a text has ended."""
    found = []
    for a, b in zip(plain.answers, drafted.answers, strict=True):
        if a.token_ids != b.token_ids:
            at = next(i for i, (x, y) in enumerate(_padded(a.token_ids, b.token_ids)) if x != y)
            x, y = _padded(a.token_ids, b.token_ids)[at]
            found.append(Difference(kind, a.prompt + a.token_ids[:at], y, x))
    return found


def _padded(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    size = max(len(a), len(b))
    return list(zip(a + [-1] * (size - len(a)), b + [-1] * (size - len(b)), strict=True))


def rows_of(method: str, batch: int, plain: dict[str, Run], drafted: dict[str, Run], asked: argparse.Namespace) -> Any:
    rows: list[Row] = []
    kinds = [*plain, OVERALL]
    for kind in kinds:
        before = joined(list(plain.values())) if kind == OVERALL else plain[kind]
        after = joined(list(drafted.values())) if kind == OVERALL else drafted[kind]
        same = sum(a.token_ids == b.token_ids for a, b in zip(before.answers, after.answers, strict=True))
        rows.append(
            {
                "case": f"{Path(asked.model).stem}+{method}",
                "kind": kind,
                "batch": batch,
                "k": asked.k or "adaptive",
                "temperature": asked.temperature,
                "tok_s": round(after.rate, 1),
                "plain_tok_s": round(before.rate, 1),
                "ratio": round(after.rate / before.rate, 3),
                "accepted_length": round(after.length, 3),
                "num_texts": len(after.answers),
                "same_texts": same,
            }
        )
    return rows


def print_table(rows: Sequence[Row], title: str) -> None:
    table = Table("method", "questions", title=title)
    for name in ("batch", "tokens a step", "tokens/s", "plain", "speed-up", "same texts"):
        table.add_column(name, justify="right")
    for r in rows:
        figures = (f"{r['accepted_length']:.2f}", f"{r['tok_s']:,.0f}", f"{r['plain_tok_s']:,.0f}", f"{r['ratio']:.2f}")
        same = f"{r['same_texts']} of {r['num_texts']}"
        table.add_row(r["case"].split("+")[-1], r["kind"], str(r["batch"]), *figures, same)
    Console(width=120).print(table)


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Speed-up by kind of question, a bar for each method and batch."""
    try:
        import matplotlib
    except ImportError:
        print('no picture: plots need matplotlib; pip install "slipstream[plots]"', file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(r["kind"] for r in rows))
    groups = list(dict.fromkeys((r["case"].split("+")[-1], r["batch"]) for r in rows))
    figure, axes = plt.subplots(figsize=(10, 5), dpi=130)
    for i, (method, batch) in enumerate(groups):
        own = {r["kind"]: r for r in rows if (r["case"].split("+")[-1], r["batch"]) == (method, batch)}
        places = [j + (i - (len(groups) - 1) / 2) * 0.8 / len(groups) for j in range(len(kinds))]
        bars = axes.bar(
            places, [own[kind]["ratio"] for kind in kinds], 0.8 / len(groups), label=f"{method}, batch {batch}"
        )
        axes.bar_label(bars, [f"{own[kind]['accepted_length']:.1f}" for kind in kinds], fontsize=6, padding=1)
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set_xticks(range(len(kinds)), kinds, rotation=15)
    axes.set(ylabel="speed-up over plain decoding (above the bars: tokens a step)", title=title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    print(f"picture: {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", default="ngram", help="of ngram and eagle3; none is always measured")
    parser.add_argument("--head", help="folder of the EAGLE-3 head")
    parser.add_argument("--k", type=int, help="as many drafts in every step; otherwise the number adapts")
    parser.add_argument("--max-k", type=int, default=7, help="most drafts where the number adapts")
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--limit", type=int, help="as many questions of each kind")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    methods = [name for name in arguments.methods.split(",") if name != "none"]
    if unknown := set(methods) - {"ngram", "eagle3"}:
        parser.error(f"unknown method {', '.join(sorted(unknown))}; ngram and eagle3 are known")
    arguments.methods = methods
    return arguments


def main() -> int:
    arguments = parse()
    prepare_folder(arguments.output_dir)
    bench = Bench(arguments, read_questions(arguments.questions, arguments.limit))
    rows: list[Row] = []
    apart: list[dict[str, Any]] = []
    for batch in map(int, arguments.batch.split(",")):
        plain = bench.run_method("none", batch)
        runs = {method: bench.run_method(method, batch) for method in arguments.methods}
        found = [(m, d) for m, run in runs.items() for kind in run for d in differences(kind, plain[kind], run[kind])]
        if found:
            gaps = bench.gaps([one for _, one in found], batch)
            apart += [
                {"method": method, "batch": batch, "kind": one.kind, "gap": gap}
                for (method, one), gap in zip(found, gaps, strict=True)
            ]
        for method, run in runs.items():
            rows += rows_of(method, batch, plain, run, arguments)
    results = collect_results([*rows, *({"case": "difference", **one} for one in apart)], device=_device())
    wanted = f"k = {arguments.k or 'adaptive'}, temperature {arguments.temperature:g}"
    title = f"Spec-Bench, {Path(arguments.model).stem}, {wanted}, {results.hardware}"
    path = write_results(results, arguments.output_dir, "spec-bench")
    print_table(rows, title)
    near = [one["gap"] for one in apart if one["gap"] < NEAR_TIE]
    if apart:
        largest = f", the largest of those {max(near):.3f}" if near else ""
        print(f"{len(apart)} texts differ; {len(near)} of them first at a gap below {NEAR_TIE}{largest}")
    print(f"written to {path}")
    plot(rows, path.with_suffix(".png"), title)
    return 0


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
