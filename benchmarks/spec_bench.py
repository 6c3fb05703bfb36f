"""Spec-Bench: 480 questions in six kinds, plain and with drafts: how far drafts are right, how fast, the same text.

One engine for each method serves all batches and temperatures. Each kind of question runs for itself, one request or
several at a time, to their end or to `--output-len` tokens, prompts included in the time, prefix caching off, best of
`--repeat` runs after a warm-up, or of three times as many where several requests run at a time, for those are over in
tenths of a second. A second turn is asked after the answer that the plain run gave to the first, so that all methods
get the same prompts. Accepted length is tokens a step that checks drafts, the target's own included; beside it tokens a
step, where steps without drafts count too.

Every text is compared with the plain run's. For one that differs, the engine is asked for the two tokens' scores at the
first difference: log probabilities, at a temperature with the noise that the seed draws. The gap is as a prefill of
what the two texts have in common sees it. That is a fair judge: it takes neither side, and how far decoding lies from
it can be measured. Where rounding moves no score by more than X from the prefill's, one run can put the one token ahead
and another run the other only if the prefill finds them at most 2 X apart. On a GPU the bench measures X with the plain
engine: the largest change between decoding and prefill. A check of drafts, a few tokens at a time, is taken to lie
between those.

A gap below 2 X, or below `--near-tie` where that is given, is a tie that the precision decided, and is counted and
shown. Any other is a fault: the exit status is 1. On a CPU every difference is one.

    python benchmarks/spec_bench.py --questions question.jsonl --methods ngram,eagle3,eagle3:4 --head FOLDER
    python benchmarks/spec_bench.py --questions question.jsonl --limit 5 --batch 1 --temperature 0.7 --kinds qa,rag

The questions are those of Spec-Bench (Xia et al., 2024; Apache-2.0).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.checkpoints.hub import resolve_model
from slipstream.commands.machine import describe_hardware
from slipstream.commands.measure import wait_for_graphs
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.engine.client import EngineClient
from slipstream.errors import ConfigError, EngineError, SlipstreamError
from slipstream.sampling.gumbel import gumbel_noise_at
from slipstream.sampling_params import MAX_LOGPROBS, SamplingParams
from spec_bench_noise import Noise, measure_noise
from spec_bench_questions import Question, read_questions
from spec_bench_report import plot, print_difference, print_tables
from spec_bench_runs import Run, answers_to, generate, joined

METHODS = ("ngram", "eagle3")
OVERALL = "overall"
WARM_UP_TOKENS = 32
RUNS_OF_MANY = 3  # for each run with one request at a time
NUM_NOISE_QUESTIONS = 16  # of each kind, at most
MAX_NOISE_BATCH = 32
NUM_SHOWN = 8  # tokens of each text where two differ


# --- texts that differ ----------------------------------------------------------------------------


@dataclass
class Difference:
    """The first token of a text that is not the plain run's; -1 where a text has ended."""

    kind: str
    prompt: list[int]  # and all tokens that the two have in common
    ours: list[int]  # of the run with drafts, from there on
    plain: list[int]
    seed: int
    gap: float | None = None  # None where the scores of the two tokens cannot be compared
    texts: tuple[str, str] = ("", "")


def differences(kind: str, plain: Run, drafted: Run) -> list[Difference]:
    found = []
    for a, b in zip(plain.answers, drafted.answers, strict=True):
        if a.prompt != b.prompt:
            raise ConfigError(f"two runs were asked different questions of kind {kind}")
        if a.token_ids != b.token_ids:
            pairs = zip(a.token_ids, b.token_ids, strict=False)
            at = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids)))
            ours, theirs = (tokens[at : at + NUM_SHOWN] or [-1] for tokens in (b.token_ids, a.token_ids))
            found.append(Difference(kind, a.prompt + a.token_ids[:at], ours, theirs, a.seed))
    return found


def judge(client: EngineClient, found: Sequence[Difference], temperature: float) -> None:
    """Fill in how far the target finds the two tokens apart, drafts or not, and how the texts go on."""
    likeliest = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS)
    outputs = answers_to(client, [one.prompt for one in found], [likeliest] * len(found))
    for one, output in zip(found, outputs, strict=True):
        ours, plain = (client.tokenizer.decode([t for t in ids if t >= 0]) for ids in (one.ours, one.plain))
        one.texts = ours, plain
        pair = [one.ours[0], one.plain[0]]
        if min(pair) < 0:
            continue
        known = (output.outputs[0].logprobs or [{}])[0]
        scores = [known[t].logprob if t in known else _logprob(client, one.prompt, t) for t in pair]
        if temperature:
            # The engine takes the largest of logits / temperature + noise. Times the temperature that is the largest of
            # logits + temperature * noise, and log probabilities are logits less a number that all tokens share. So
            # these scores have the engine's order, and as the noise is the same in every run, rounding moves them as
            # it moves log probabilities: the tolerance is the same at every temperature.
            seeds = torch.from_numpy(np.array([[one.seed]], dtype=np.uint64).view(np.int32))
            at = (torch.tensor([len(one.prompt)], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
            noise = gumbel_noise_at(seeds, *at, torch.tensor(pair, dtype=torch.int32))[0].tolist()
            scores = [score + temperature * own for score, own in zip(scores, noise, strict=True)]
        one.gap = abs(scores[0] - scores[1])


def _logprob(client: EngineClient, prompt: list[int], token: int) -> float:
    """Of a token that is not among the likeliest: as the last one of a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = answers_to(client, [[*prompt, token]], [params])
    if output.prompt_logprobs is None or output.prompt_logprobs[-1] is None:
        raise EngineError("the engine gave no log probabilities of a prompt")
    return output.prompt_logprobs[-1][token].logprob


# --- the bench ------------------------------------------------------------------------------------


class Method(NamedTuple):
    name: str
    k: int | None = None  # as many drafts in every step; None: the number adapts

    def __str__(self) -> str:
        return self.name if self.k is None else f"{self.name}:{self.k}"


PLAIN = Method("none")


class Setting(NamedTuple):
    temperature: float
    batch: int


Runs = dict[Setting, dict[str, Run]]  # by kind
Differences = dict[Setting, list[Difference]]


class Bench:
    """One engine after the other over all questions, the plain one first."""

    def __init__(self, arguments: argparse.Namespace, questions: dict[str, list[Question]]) -> None:
        self.arguments, self.questions = arguments, questions
        self.settings = [Setting(t, b) for t in arguments.temperature for b in arguments.batch]
        self.device = "cpu"  # until an engine says otherwise
        self.noise: Noise | None = None  # where it is measured
        # First answers of the plain run, which second turns follow in every run.
        self._first_answers: dict[tuple[Setting, str], list[str]] = {}

    def options(self, method: Method) -> EngineOptions:
        arguments = self.arguments
        speculate: dict[str, Any] | None = None
        if method != PLAIN:
            speculate = {"method": method.name, "num_speculative_tokens": method.k or arguments.max_k}
            speculate |= {"adaptive": method.k is None}
            speculate |= {"model": arguments.head} if method.name == "eagle3" else {}
        return EngineOptions(
            model=arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            enable_prefix_caching=False,  # the same prompts come again
            max_num_seqs=max(arguments.batch),
            max_model_len=arguments.max_model_len,
            speculative_config=speculate,
            seed=0,
        )

    def params(self, temperature: float, count: int) -> list[SamplingParams]:
        """Nothing but the temperature acts, whatever the model's own defaults are."""
        shared = SamplingParams(
            temperature=temperature,
            max_tokens=self.arguments.output_len,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            repetition_penalty=1.0,
        )
        return [replace(shared, seed=i) for i in range(count)]

    def prompts(self, client: EngineClient, asked: Sequence[Question], answers: Sequence[str] = ()) -> list[list[int]]:
        """Of first turns, or of second ones after these answers. A prompt that is too long keeps its end."""
        room = self.arguments.max_model_len - self.arguments.output_len - 1
        made = []
        for i, question in enumerate(asked):
            messages = [{"role": "user", "content": question.turns[0]}]
            if answers:
                messages.append({"role": "assistant", "content": answers[i]})
                messages.append({"role": "user", "content": question.turns[1]})
            made.append(client.tokenizer.encode_chat(messages)[-room:])
        return made

    def run_kind(self, client: EngineClient, setting: Setting, kind: str) -> Run:
        asked = self.questions[kind]
        prompts = self.prompts(client, asked)
        runs = [generate(client, prompts, self.params(setting.temperature, len(prompts)), setting.batch)]
        texts = self._first_answers.setdefault((setting, kind), [answer.text for answer in runs[0].answers])
        again = [(q, text) for q, text in zip(asked, texts, strict=True) if len(q.turns) > 1]
        if again:
            prompts = self.prompts(client, [q for q, _ in again], [text for _, text in again])
            runs.append(generate(client, prompts, self.params(setting.temperature, len(prompts)), setting.batch))
        return joined(runs)

    def warm_up(self, client: EngineClient, setting: Setting) -> None:
        """A few tokens of one question of each kind, as many at a time as will be measured."""
        asked = [questions[0] for questions in self.questions.values()]
        asked = [asked[i % len(asked)] for i in range(setting.batch)]
        params = [replace(one, max_tokens=WARM_UP_TOKENS) for one in self.params(setting.temperature, setting.batch)]
        generate(client, self.prompts(client, asked), params, setting.batch)

    def run_method(self, method: Method, plain: Runs | None = None) -> tuple[Runs, Differences]:
        """The best runs; where there are plain ones, also the texts that differ from theirs."""
        begin = time.monotonic()
        client = EngineClient.in_thread(lambda: build_engine(self.options(method)))
        best: Runs = {}
        apart: Differences = {}
        try:
            self.device = client.config.device
            wait_for_graphs(client)
            self._say(f"{method}: ready after {time.monotonic() - begin:.0f} s")
            for setting in self.settings:
                self.warm_up(client, setting)
                best[setting] = {}
                for kind in self.questions:
                    num_runs = self.arguments.repeat * (RUNS_OF_MANY if setting.batch > 1 else 1)
                    runs = [self.run_kind(client, setting, kind) for _ in range(num_runs)]
                    run = best[setting][kind] = max(runs, key=lambda run: run.rate)
                    figures = f"{run.rate:,.0f} tokens/s, {run.steps.tokens_a_step:.2f} a step, {run.seconds:.1f} s"
                    figures += f", {run.busy_s / run.seconds:.0%} of it in steps"
                    self._say(
                        f"{method}, temperature {setting.temperature:g}, batch {setting.batch}, {kind}: {figures}"
                    )
            if method == PLAIN and self.measures_noise:
                self.noise = self.noise_of(client)
            for setting, before in (plain or {}).items():
                apart[setting] = [d for kind in before for d in differences(kind, before[kind], best[setting][kind])]
                judge(client, apart[setting], setting.temperature)
        finally:
            client.close()
        return best, apart

    def noise_of(self, client: EngineClient) -> Noise:
        """Over greedy answers to some first turns of each kind."""
        asked = [question for own in self.questions.values() for question in own[:NUM_NOISE_QUESTIONS]]
        batch = min(MAX_NOISE_BATCH, max(self.arguments.batch))
        return measure_noise(client, self.prompts(client, asked), self.params(0.0, len(asked)), batch)

    @property
    def measures_noise(self) -> bool:
        """A CPU computes a token among others as it computes it alone: nothing there is a tie."""
        return self.arguments.near_tie is None and self.device.startswith("cuda")

    @property
    def near_tie(self) -> float:
        given: float | None = self.arguments.near_tie
        return given if given is not None else self.noise.tolerance if self.noise is not None else 0.0

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def rows(self, method: Method, runs: Runs, plain: Runs, apart: Differences) -> list[Row]:
        """By setting and kind; over all kinds only where all were asked."""
        asked, rows = self.arguments, []
        for setting, by_kind in runs.items():
            for kind in [*by_kind, *([] if asked.kinds else [OVERALL])]:
                before, after = (
                    joined(r[setting].values()) if kind == OVERALL else r[setting][kind] for r in (plain, runs)
                )
                other = [d for d in apart.get(setting, []) if kind in (OVERALL, d.kind)]
                num_ties = sum(is_near_tie(d, self.near_tie) for d in other)
                rows.append(
                    {
                        "case": f"{model_name(asked.model)}+{method.name}",
                        "kind": kind,
                        "batch": setting.batch,
                        "k": 0 if method == PLAIN else method.k or "adaptive",
                        "temperature": setting.temperature,
                        "limit": asked.limit,
                        "output_len": asked.output_len,
                        "tok_s": round(after.rate, 1),
                        "plain_tok_s": round(before.rate, 1),
                        "ratio": round(after.rate / before.rate, 3),
                        "accepted_length": round(after.steps.accepted_length, 3),
                        "tokens_a_step": round(after.steps.tokens_a_step, 3),
                        "num_tokens": after.num_tokens,
                        "seconds": round(after.seconds, 3),
                        "busy_s": round(after.busy_s, 3),
                        "num_texts": len(after.answers),
                        "same_texts": len(after.answers) - len(other),
                        "near_ties": num_ties,
                        "faults": len(other) - num_ties,
                    }
                )
        return rows


def is_near_tie(found: Difference, tolerance: float) -> bool:
    return found.gap is not None and found.gap < tolerance


def model_name(model: str) -> str:
    return Path(model).name.removesuffix(".gguf")


def difference_row(method: Method, setting: Setting, found: Difference, tolerance: float) -> Row:
    return {
        "case": "difference",
        "method": str(method),
        "batch": setting.batch,
        "temperature": setting.temperature,
        "kind": found.kind,
        "place": len(found.prompt),
        "gap": None if found.gap is None else round(found.gap, 4),
        "near_tie": is_near_tie(found, tolerance),
        "drafted": found.texts[0],
        "plain": found.texts[1],
    }


# --- the command ----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--methods",
        default="ngram",
        help="of ngram and eagle3: eagle3:4 makes 4 drafts in every step, without a number it adapts; none is always "
        "measured",
    )
    parser.add_argument("--head", help="folder of the EAGLE-3 head")
    parser.add_argument("--max-k", type=int, default=7, help="most drafts where the number adapts")
    parser.add_argument("--batch", default="1,32", help="requests at a time, such as 1,32")
    parser.add_argument("--temperature", default="0,0.7", help="such as 0,0.7")
    parser.add_argument("--kinds", default="", help="only these kinds of questions, such as qa,rag")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--limit", type=int, help="as many questions of each kind")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--near-tie", type=float, help="gaps below it are no faults; measured on a GPU and 0 on a CPU if unset"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    arguments.kinds = [kind for kind in arguments.kinds.split(",") if kind]
    named = [word.partition(":") for word in arguments.methods.split(",") if word and word != "none"]
    if unknown := [name for name, _, _ in named if name not in METHODS]:
        parser.error(f"unknown method {unknown[0]}; {', '.join(METHODS)} are known")
    if wrong := [k for _, colon, k in named if colon and not (k.isdecimal() and int(k) > 0)]:
        parser.error(f"a method's number of drafts is at least 1, not '{wrong[0]}'")
    arguments.methods = [Method(name, int(k) if k else None) for name, _, k in named]
    try:
        arguments.batch = [int(size) for size in arguments.batch.split(",")]
        arguments.temperature = [float(number) for number in arguments.temperature.split(",")]
    except ValueError as error:
        parser.error(f"--batch and --temperature are numbers with commas between: {error}")
    limit = 1 if arguments.limit is None else arguments.limit
    if min(*arguments.batch, arguments.repeat, arguments.output_len, limit) < 1 or min(arguments.temperature) < 0:
        parser.error("--batch, --repeat, --limit and --output-len are at least 1, --temperature at least 0")
    if arguments.max_model_len < arguments.output_len + 2:
        parser.error("--max-model-len must leave room for a prompt before --output-len tokens")
    if any(method.name == "eagle3" for method in arguments.methods) and not arguments.head:
        parser.error("eagle3 drafts with a head of the model; name its folder with --head")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    bench = Bench(arguments, read_questions(arguments.questions, arguments.limit, arguments.kinds))
    prepare_folder(arguments.output_dir)
    if arguments.head:
        resolve_model(arguments.head, is_head=True)  # before minutes of plain runs
    plain, _ = bench.run_method(PLAIN)
    rows, apart = bench.rows(PLAIN, plain, plain, {}), []
    noise = [] if bench.noise is None else [bench.noise.row]
    results = collect_results([*rows, *noise], device=bench.device)
    path = write_results(results, arguments.output_dir, "spec-bench")
    for method in arguments.methods:
        runs, found = bench.run_method(method, plain)
        rows += bench.rows(method, runs, plain, found)
        apart += [difference_row(method, s, d, bench.near_tie) for s, many in found.items() for d in many]
        # After each, so that what was measured is kept whatever happens to the next.
        results = collect_results([*rows, *noise, *apart], device=bench.device)
        path.write_text(results.as_json(), encoding="utf-8")
    title = f"Spec-Bench, {model_name(arguments.model)}, {describe_hardware(bench.device)}"
    for row in sorted(apart, key=lambda row: not row["near_tie"]):  # faults where they are seen
        print_difference(row)
    print_tables(rows, title)
    if bench.noise is not None:
        print(bench.noise)
    faults = sum(not row["near_tie"] for row in apart)
    print(f"{len(apart)} texts differ from the plain run's: {len(apart) - faults} near-ties, {faults} faults")
    print(f"written to {path}")
    if drafted := [row for row in rows if row["k"] != 0]:
        plot(drafted, path.with_suffix(".png"), title)
    return 1 if faults else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
