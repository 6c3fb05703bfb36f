"""What a grammar costs: constrained against free decoding on one engine, and a new schema beside running requests.

    python benchmarks/grammar_overhead.py                          # on an NVIDIA H200
    python benchmarks/grammar_overhead.py --cases smollm2-135m --device cpu --batch 1,2 --output-len 24 --repeat 1

`smollm2-135m` runs with the head that ships with it, an 8B shape with random weights plain and with an EAGLE-3 head
whose drafts are accepted at fixed rates if they are legal. The shape's tokens are words, so that in a string of JSON
nearly every draft is legal, as a good drafter's are. The runs take turns, since the speed of a machine drifts.

Of constrained steps: `gpu_wait_us`, how long the device waited for masks, and `host_wait_us`, how long the host did.
Both are means of a step. Row `compile`: the longest time between two tokens of running requests, by themselves and
while schemas that the engine has never seen are compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import string
import sys
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from slipstream import SamplingParams, StructuredOutput
from slipstream.checkpoints.hub import with_shipped_head
from slipstream.commands.measure import BatchRun, decode_rate, in_turns, run_batch, wait_for_graphs
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine, build_shape
from slipstream.engine.client import EngineClient
from slipstream.grammar.guidance import find_refusal
from slipstream.models.shapes import forced_eagle3, shape_config
from slipstream.text.tokenizer import Tokenizer

SHAPE = "llama-3.1-8b"
CASES = ("smollm2-135m", SHAPE, f"{SHAPE}+forced")
SCHEMAS = Path(__file__).parents[1] / "tests/grammar/json_schema_bench.jsonl"
NUM_NEW_SCHEMAS = 16
# It hardly ever ends by itself: there is always another person, and a string goes on.
PEOPLE = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "role": {"enum": ["author", "editor", "reader"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "age", "role"],
        "additionalProperties": False,
    },
}


def words_tokenizer(vocab_size: int) -> Tokenizer:
    """All bytes, and words of letters up to the size of the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=4))
    tokens = [*letters, *itertools.islice(words, vocab_size - len(letters) - 1)]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, named_tokens={"eos_token": "</s>"})


def build(case: str, device: str, max_batch: int, max_len: int) -> Engine:
    shared: dict[str, Any] = {"device": device, "max_num_seqs": max_batch, "max_model_len": max_len, "seed": 0}
    if not case.startswith(SHAPE):
        return build_engine(with_shipped_head(EngineOptions(model=case, **shared), by_default=True))
    speculative = forced_eagle3(SHAPE, 3) if case.endswith("+forced") else None
    options = EngineOptions(dtype="bfloat16", speculative_config=speculative, **shared)
    return build_shape(options, SHAPE, words_tokenizer(shape_config(SHAPE)["vocab_size"]))


def prompts_for(client: EngineClient, batch: int) -> list[list[int]]:
    assert client.tokenizer is not None
    texts = [f"A list of {10 + i} people as JSON, with name, age and role:\n" for i in range(batch)]
    return [client.tokenizer.encode(text) for text in texts]


def measure(client: EngineClient, case: str, batch: int, output_len: int, repeat: int) -> Row:
    prompts, structured = prompts_for(client, batch), StructuredOutput(json=PEOPLE)
    for structure in (None, structured):  # a warm-up
        run_batch(client, prompts, 8, structured=structure)
    waits = []

    def run_constrained() -> BatchRun:
        before = client.stats
        steps, paused, waited = before.num_masked_steps, before.mask_pause_s, before.mask_wait_s
        run = run_batch(client, prompts, output_len, structured=structured)
        after = client.stats
        count = max(1, after.num_masked_steps - steps)
        waits.append(((after.mask_pause_s - paused) / count, (after.mask_wait_s - waited) / count))
        return run

    free, constrained = in_turns(repeat, [lambda: run_batch(client, prompts, output_len), run_constrained])
    rates = [max(decode_rate(run.arrivals) for run in runs) for runs in (free, constrained)]
    return {
        "case": "grammar-overhead",
        "model": case,
        "batch": batch,
        "ratio": round(rates[1] / rates[0], 4),
        "tok_s": round(rates[1], 1),
        "free_tok_s": round(rates[0], 1),
        "tokens_a_step": round(constrained[-1].tokens_a_step, 3),
        "free_tokens_a_step": round(free[-1].tokens_a_step, 3),
        "gpu_wait_us": round(1e6 * min(pause for pause, _ in waits), 1),
        "host_wait_us": round(1e6 * min(wait for _, wait in waits), 1),
        "output_len": output_len,
        "device": client.config.device,
        "dtype": client.config.dtype,
    }


def longest_gap_ms(run: BatchRun) -> float:
    """Between two tokens of one request."""
    last: dict[int, float] = {}
    gaps = []
    for arrival in run.arrivals:
        if arrival.request_idx in last:
            gaps.append(arrival.time - last[arrival.request_idx])
        last[arrival.request_idx] = arrival.time
    return 1e3 * max(gaps)


def measure_compiling(client: EngineClient, case: str, batch: int, output_len: int) -> Row:
    """New schemas arrive one by one while a batch of free requests decodes."""
    lines = SCHEMAS.read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    structures = [StructuredOutput(json=json.loads(line)["schema"]) for line in lines]
    new = [structure for structure in structures if find_refusal(structure) is None][:NUM_NEW_SCHEMAS]
    prompts = prompts_for(client, batch)
    alone = longest_gap_ms(run_batch(client, prompts, output_len))
    num_sent = 0

    def send_next(_count: int) -> None:
        nonlocal num_sent
        if num_sent < len(new):
            params = SamplingParams(max_tokens=1, temperature=0.0, structured=new[num_sent])
            client.submit(client.prepare(prompts[0], params), lambda _output: None)
            num_sent += 1

    beside = longest_gap_ms(run_batch(client, prompts, output_len, send_next))
    return {
        "case": "grammar-overhead-compile",
        "model": case,
        "batch": batch,
        "schemas": num_sent,
        "longest_gap_ms": round(beside, 2),
        "longest_gap_alone_ms": round(alone, 2),
        "delay_ms": round(beside - alone, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    folder, batches = prepare_folder(options.output_dir), [int(batch) for batch in options.batch.split(",")]
    rows: list[Row] = []
    for case in options.cases.split(","):
        max_len = options.output_len + 128
        room = max(batches) + NUM_NEW_SCHEMAS
        client = EngineClient.in_thread(lambda case=case, room=room, n=max_len: build(case, options.device, room, n))
        try:
            if options.device == "cuda":
                wait_for_graphs(client)
            for batch in batches:
                rows.append(measure(client, case, batch, options.output_len, options.repeat))
                print(json.dumps(rows[-1]), flush=True)
            rows.append(measure_compiling(client, case, batches[len(batches) // 2], options.output_len))
            print(json.dumps(rows[-1]), flush=True)
        finally:
            client.close()
        time.sleep(1)
    print(write_results(collect_results(rows, device=options.device), folder, "grammar-overhead"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
