"""The same text on quantised weights alone, in batches and with drafts, for requests with drawn prompts and parameters.

The reference is each request by itself without drafts. Each way of serving gets all requests at once, in batches, with
prompts in chunks, and its token ids must be those of the reference: the sums of the kernels depend neither on the
tokens beside a token nor on the instructions of the processor (`--isa` counts the ways again with fewer of them).

    python benchmarks/quant_lossless.py smollm2-135m --requests 200
    python benchmarks/quant_lossless.py large.gguf --draft-model small.gguf --requests 200 --isa native,avx2

The exit status is 1 where a token differs, or a drafter had no draft accepted.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from code_prompts import EDIT, WRITE
from slipstream import LLM, SamplingParams
from slipstream.checkpoints.hub import resolve_model, shipped_head
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.kernels import native
from slipstream.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("perplexity_text.txt")
Request = tuple[list[int], SamplingParams]


def draw_requests(tokenizer: Tokenizer, num_requests: int, output_len: int, seed: int) -> list[Request]:
    """Questions, code to change and pieces of prose of any length; greedy and sampled, with and without penalties."""
    rng = random.Random(seed)
    prose = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    requests = []
    for _ in range(num_requests):
        if rng.random() < 0.5:
            begin, length = rng.randrange(len(prose) - 300), rng.randint(1, 300)
            prompt = prose[begin : begin + length]
        else:
            prompt = tokenizer.encode_chat([{"role": "user", "content": rng.choice([*WRITE, *EDIT])}])
        given: dict[str, Any] = {"temperature": 0.0} if rng.random() < 0.5 else {"temperature": 0.8, "top_p": 0.95}
        if rng.random() < 0.2:
            given["repetition_penalty"] = 1.1
        params = SamplingParams(max_tokens=rng.randint(1, output_len), seed=rng.getrandbits(32), **given)
        requests.append((prompt, params))
    return requests


def ways_of_serving(model: str, draft_model: str | None) -> dict[str, dict[str, Any]]:
    ways: dict[str, dict[str, Any]] = {
        "batches": {"max_num_seqs": 8},
        "small steps": {"max_num_seqs": 5, "max_num_batched_tokens": 48},
        "ngram": {"max_num_seqs": 8, "speculate": "ngram", "k": 3},
        "ngram, adaptive": {"max_num_seqs": 3, "speculate": "ngram", "enable_prefix_caching": True},
    }
    if shipped_head(model) is not None:
        ways["head"] = {"max_num_seqs": 4, "speculate": "eagle3", "k": 4}
        ways["head, adaptive"] = {"max_num_seqs": 1, "speculate": "eagle3"}
    if draft_model is not None:
        pair = {"speculate": "draft_model", "draft_model": str(resolve_model(draft_model))}
        ways["draft model"] = {"max_num_seqs": 4, "k": 3, **pair}
    return ways


def serve(model: str, requests: Sequence[Request], options: dict[str, Any]) -> tuple[list[list[int]], Row]:
    """The token ids of all requests, and how many drafts there were."""
    chosen = {"device": "cpu", "max_model_len": 2048, "enable_prefix_caching": False, **options}
    begun = time.perf_counter()
    with LLM(model, **chosen) as llm:
        outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    if failed := [output.error for output in outputs if output.error is not None]:
        raise SystemExit(f"{model}: a request failed: {failed[0]}")
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    drafts = [output.speculation for output in outputs]
    return token_ids, {
        "num_tokens": sum(map(len, token_ids)),
        "num_drafts": sum(each.num_drafts for each in drafts if each),
        "num_accepted": sum(each.num_accepted for each in drafts if each),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def compare(model: str, arguments: argparse.Namespace) -> list[Row]:
    """A row for each way of serving and instruction set; the reference is served with all instructions."""
    native.use_isa("native")
    with LLM(model, device="cpu", max_num_seqs=1, max_model_len=2048) as llm:
        tokenizer = llm.tokenizer
    requests = draw_requests(tokenizer, arguments.requests, arguments.output_len, arguments.seed)
    expected, figures = serve(model, requests, {"max_num_seqs": 1})
    case = resolve_model(model).name
    print(f"{case}: {figures['num_tokens']} tokens alone, {figures['seconds']} s", flush=True)
    rows: list[Row] = []
    for isa in arguments.isa:
        native.use_isa(isa)
        for name, options in ways_of_serving(model, arguments.draft_model).items():
            if arguments.ways and name not in arguments.ways:
                continue
            found, figures = serve(model, requests, options)
            different = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
            row = {"case": case, "batch": options["max_num_seqs"], "way": name, "isa": isa, "options": options}
            row |= {"num_requests": len(requests), "num_different": len(different), "different": different, **figures}
            rows.append(row)
            drafts = f", {row['num_accepted']} of {row['num_drafts']} drafts accepted" if row["num_drafts"] else ""
            line = f"{case}, {isa}, {name}: {len(different)} of {len(requests)} requests differ"
            print(f"{line}{drafts} ({row['seconds']} s)", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"], help="GGUF files, folders or aliases")
    parser.add_argument("--draft-model", help="drafts for each of the models, besides n-grams and heads")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--isa", default="native", help="of native, avx2 and baseline, each in turn")
    parser.add_argument("--ways", help="some of the ways of serving, by name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    arguments.isa = arguments.isa.split(",")
    arguments.ways = arguments.ways.split(";") if arguments.ways else []
    prepare_folder(arguments.output_dir)
    rows = [row for model in arguments.models for row in compare(model, arguments)]
    print(f"written to {write_results(collect_results(rows), arguments.output_dir, 'quant-lossless')}")
    num_different = sum(row["num_different"] for row in rows)
    idle = [row["way"] for row in rows if "speculate" in row["options"] and not row["num_accepted"]]
    for way in idle:
        print(f"this run says too little: {way} had no draft accepted")
    print(f"{num_different} differences")
    return 1 if num_different or idle else 0


if __name__ == "__main__":
    sys.exit(main())
