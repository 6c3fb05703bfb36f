"""The text part of ``exact.py``: Spec-Bench with every drafter, and prompts under every setting, to the bit."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from slipstream.commands.results import Row
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.engine.client import EngineClient
from slipstream.output import RequestOutput
from slipstream.sampling_params import SamplingParams
from spec_bench import OVERALL, PLAIN, Bench, Method, Runs, Setting, model_name
from spec_bench_questions import Question
from spec_bench_runs import Answer, answers_to

NUM_SETTING_PROMPTS = 64
SETTING_TOKENS = 64
TOP = 5  # log probabilities of each token that are compared


class ExactBench(Bench):
    """Spec-Bench's runs by exact engines."""

    def options(self, method: Method) -> EngineOptions:
        return replace(super().options(method), exact=True)

    @property
    def measures_noise(self) -> bool:
        return False  # no difference is a tie


def compare_texts(bench: ExactBench, arguments: argparse.Namespace) -> list[Row]:
    """Every text with the plain run's at batch 1 and the same temperature; in the last row all with drafts."""
    plain, _ = bench.run_method(PLAIN)
    rows = text_rows(arguments, PLAIN, plain, plain)
    drafted: list[Row] = []
    for method in arguments.methods:
        runs, _ = bench.run_method(method)
        drafted += text_rows(arguments, method, runs, plain)
    total = {name: sum(row[name] for row in drafted) for name in ("texts", "texts_equal", "tokens")}
    name = {"case": "exact-spec-bench", "model": model_name(arguments.model), "batch": 0, "method": OVERALL}
    return [*rows, *drafted, name | total]


def text_rows(arguments: argparse.Namespace, method: Method, runs: Runs, plain: Runs) -> list[Row]:
    rows = []
    for setting, by_kind in runs.items():
        reference = plain[Setting(setting.temperature, min(arguments.batch))]
        pairs = [
            pair for kind, run in by_kind.items() for pair in zip(run.answers, reference[kind].answers, strict=True)
        ]
        row: Row = {
            "case": "exact-spec-bench",
            "model": model_name(arguments.model),
            "batch": setting.batch,
            "method": str(method),
            "temperature": setting.temperature,
            "texts": len(pairs),
            "texts_equal": sum(is_equal(own, other) for own, other in pairs),
            "tokens": sum(len(own.token_ids) for own, _ in pairs),
        }
        rows.append(row)
        print(f"{row}", file=sys.stderr, flush=True)
    return rows


def is_equal(own: Answer, other: Answer) -> bool:
    return own.prompt == other.prompt and own.token_ids == other.token_ids


# --- settings ---------------------------------------------------------------------------------------


def combinations(device: str, num_pages: int) -> Iterator[dict[str, Any]]:
    """Chunks, prefix cache, steps in flight, preemption, graphs: every combination that the device has."""
    chunks = ({"long_prefill_token_threshold": 64}, {"max_num_batched_tokens": 8192})
    cached = ({"enable_prefix_caching": True}, {"enable_prefix_caching": False})
    steps = ({"steps_in_flight": 2}, {"steps_in_flight": 3})
    pages = ({}, {"num_gpu_blocks_override": num_pages})
    graphs = ({"cudagraph_mode": "full"}, {"cudagraph_mode": "none"}) if device == "cuda" else ({},)
    for chosen in itertools.product(chunks, cached, steps, pages, graphs):
        yield {name: value for one in chosen for name, value in one.items()}


def compare_settings(bench: ExactBench, questions: Sequence[Question], arguments: argparse.Namespace) -> list[Row]:
    """Tokens and log probabilities of some prompts, against the same by themselves, one at a time."""
    asked = list(questions)[:NUM_SETTING_PROMPTS]
    tokens = min(SETTING_TOKENS, arguments.output_len)
    params = [
        replace(one, max_tokens=tokens, logprobs=TOP, temperature=0.7 * (i % 2))
        for i, one in enumerate(bench.params(0.0, len(asked)))
    ]
    base = bench.options(PLAIN)
    prompts: list[list[int]] = []

    def run(options: EngineOptions, batch: int | None) -> tuple[list[RequestOutput], EngineClient]:
        client = EngineClient.in_thread(lambda: build_engine(options))
        try:
            prompts[:] = prompts or bench.prompts(client, asked)
            answers_to(client, prompts, [warm_up()] * len(prompts), batch)  # what is cached now is found below
            return answers_to(client, prompts, params, batch), client
        finally:
            client.close()

    expected, client = run(replace(base, max_num_seqs=1, steps_in_flight=1), 1)
    reference = [numbers_of(output) for output in expected]
    # Room for the longest request and a part of another: most are preempted.
    longest = -(-(max(len(prompt) for prompt in prompts) + tokens) // base.block_size)
    num_pages = longest + longest // 2 + 2
    rows = []
    for options in combinations(client.config.device, num_pages):
        outputs, other = run(replace(base, max_num_seqs=max(arguments.batch), **options), None)
        differ = sum(numbers_of(output) != one for output, one in zip(outputs, reference, strict=True))
        stats = other.stats
        counts = {"num_preemptions": stats.num_preemptions, "num_cached_tokens": stats.num_cached_tokens}
        where = {"case": "exact-settings", "model": model_name(arguments.model), "batch": max(arguments.batch)}
        rows.append(where | {"texts": len(outputs), "differences": differ, **counts, "options": options})
        print(f"{rows[-1]}", file=sys.stderr, flush=True)
    return rows


def warm_up() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1)


def numbers_of(output: RequestOutput) -> tuple[Any, ...]:
    """To the bit: floats are equal or not."""
    return (output.token_ids, output.outputs[0].logprobs)
