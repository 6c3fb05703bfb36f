"""What a grammar costs: constrained against free decoding on one engine, and a new schema beside running requests.

    python benchmarks/grammar_overhead.py                          # on an NVIDIA H200
    python benchmarks/grammar_overhead.py --cases smollm2-135m --device cpu --batch 1,8 --output-len 64

`smollm2-135m` runs with the head that ships with it, an 8B shape with random weights plain and with an EAGLE-3 head
whose drafts are accepted at fixed rates if they are legal. The shape's tokens are words, so that in a string of JSON
nearly every draft is legal, as a good drafter's are. The runs take turns, since the speed of a machine drifts.

Of constrained steps: `gpu_wait_us`, how long the device waited for masks, and `host_wait_us`, how long the host did.
Both are means of a step. `free_ratio`: the speed of free requests while half of the batch is constrained, against the
same requests in a batch that is free.

Rows `grammar-overhead-first` and `-compile`: free requests run, and the first constrained request of the engine
arrives, or schemas arrive that the engine has never seen. `delay_ms`: the longest time between two tokens of a free
request is by so much longer than without them. With `--unprepared` the engine has not read its vocabulary before, as
that of `LLM`; otherwise it has, as a server's.

Row `grammar-overhead-lock`, with `--locks`: for how long no other thread can run Python while the vocabulary is read,
and while a schema is compiled, of all that are served. It is what delays steps on a GPU, where the host has time. Noise
of the machine only adds to it, so the least of several turns counts for each, and `compile_ms` is the largest of those;
`alone_ms` is the same of as many turns in which nothing is compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import string
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from slipstream import SamplingParams, StructuredOutput
from slipstream.checkpoints.hub import with_shipped_head
from slipstream.commands.measure import BatchRun, decode_rate, in_turns, run_batch, wait_for_graphs
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine, build_shape, open_target
from slipstream.engine.client import EngineClient
from slipstream.grammar.constraints import Constraints, MaskLimits
from slipstream.grammar.guidance import Guidance, find_refusal
from slipstream.grammar.threads import WorkerThreads
from slipstream.models.shapes import forced_eagle3, shape_config
from slipstream.request import Request
from slipstream.text.tokenizer import Tokenizer

SHAPE = "llama-3.1-8b"
CASES = ("smollm2-135m", SHAPE, f"{SHAPE}+forced")
SCHEMAS = Path(__file__).parents[1] / "tests/grammar/json_schema_bench.jsonl"
NUM_NEW_SCHEMAS = 16
_LOOK_EVERY_S = 0.0002
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


def build(case: str, device: str, max_batch: int, max_len: int, is_prepared: bool = True) -> Engine:
    engine = _build(case, device, max_batch, max_len)
    if is_prepared:
        engine.core.prepare_to_serve()
    return engine


def _build(case: str, device: str, max_batch: int, max_len: int) -> Engine:
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
    half: list[StructuredOutput | None] = [structured if i % 2 else None for i in range(batch)]

    def run_constrained() -> BatchRun:
        before = client.stats
        steps, paused, waited = before.num_masked_steps, before.mask_pause_s, before.mask_wait_s
        run = run_batch(client, prompts, output_len, structured=structured)
        after = client.stats
        count = max(1, after.num_masked_steps - steps)
        waits.append(((after.mask_pause_s - paused) / count, (after.mask_wait_s - waited) / count))
        return run

    turns = [lambda: run_batch(client, prompts, output_len), run_constrained]
    if batch > 1:
        turns.append(lambda: run_batch(client, prompts, output_len, structured=half))
    free, constrained, *mixed = in_turns(repeat, turns)
    rates = [max(decode_rate(run.arrivals) for run in runs) for runs in (free, constrained)]
    shared: Row = {}
    if mixed:
        with_grammars, without = (max(free_rate(run, half) for run in runs) for runs in (mixed[0], free))
        shared = {"free_ratio": round(with_grammars / without, 4), "free_mixed_tok_s": round(with_grammars, 1)}
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
        **shared,
        "output_len": output_len,
        "device": client.config.device,
        "dtype": client.config.dtype,
    }


def free_rate(run: BatchRun, structures: Sequence[StructuredOutput | None]) -> float:
    """Of the requests that have no grammar in the mixed batch."""
    return decode_rate([arrival for arrival in run.arrivals if structures[arrival.request_idx] is None])


def longest_lock_ms(work: Callable[[], object]) -> float:
    """The longest time for which this thread could not go on while another one worked: time of the process, which
    others on the machine do not add to."""
    worker = threading.Thread(target=work)
    longest, last = 0.0, time.process_time()
    worker.start()
    while worker.is_alive():
        time.sleep(_LOOK_EVERY_S)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    return 1e3 * longest


def measure_locks(case: str, repeat: int) -> Row:
    """What the engine does with a new schema, without an engine beside it."""
    tokenizer = open_target(EngineOptions(model=case)).tokenizer()
    vocab_size, ends = tokenizer.vocab_size, [tokenizer.eos_token_id or 0]
    backends = [Guidance(tokenizer, vocab_size, ends) for _ in range(repeat)]
    reading = min(longest_lock_ms(backend.prepare) for backend in backends)
    limits, structures = MaskLimits(vocab_size, 1, 1, 0), new_structures(None)
    longest, alone = [], []
    for structure in structures:
        params = SamplingParams(structured=structure)
        turns = []
        for _ in range(repeat):
            constraints = Constraints(backends[0], WorkerThreads(), limits, ends)
            turns.append(longest_lock_ms(lambda c=constraints, p=params: _compile(c, p)))  # type: ignore[misc]
        longest.append(min(turns))
        alone.append(min(longest_lock_ms(lambda: time.sleep(0.003)) for _ in range(repeat)))
    return {
        "case": "grammar-overhead-lock",
        "model": case,
        "batch": 0,
        "schemas": len(structures),
        "vocabulary_ms": round(reading, 2),
        "compile_ms": round(max(longest), 2),
        "median_compile_ms": round(statistics.median(longest), 2),
        "alone_ms": round(max(alone), 2),
    }


def _compile(constraints: Constraints, params: SamplingParams) -> None:
    constraints.add(Request("r", (1,), params, (), 9))
    while constraints.is_compiling:
        constraints.take_compiled(1.0)


def longest_gap_ms(run: BatchRun) -> float:
    """Between two tokens of one request."""
    last: dict[int, float] = {}
    gaps = []
    for arrival in run.arrivals:
        if arrival.request_idx in last:
            gaps.append(arrival.time - last[arrival.request_idx])
        last[arrival.request_idx] = arrival.time
    return 1e3 * max(gaps)


def new_structures(count: int | None) -> list[StructuredOutput]:
    lines = SCHEMAS.read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    structures = [StructuredOutput(json=json.loads(line)["schema"]) for line in lines]
    return [structure for structure in structures if find_refusal(structure) is None][:count]


def measure_delay(client: EngineClient, case: str, batch: int, output_len: int, new: Sequence[StructuredOutput]) -> Row:
    """New schemas arrive one by one while a batch of free requests decodes."""
    prompts = prompts_for(client, batch)
    run_batch(client, prompts, 8)  # a warm-up
    alone = longest_gap_ms(run_batch(client, prompts, output_len))
    waiting = [client.prepare(prompts[0], SamplingParams(max_tokens=1, temperature=0.0, structured=s)) for s in new]
    num_sent = 0

    def send_next(_count: int) -> None:
        nonlocal num_sent
        if waiting:
            client.submit(waiting.pop(), lambda _output: None)
            num_sent += 1

    beside = longest_gap_ms(run_batch(client, prompts, output_len, send_next))
    return {
        "model": case,
        "batch": batch,
        "schemas": num_sent,
        "longest_gap_ms": round(beside, 2),
        "longest_gap_alone_ms": round(alone, 2),
        "delay_ms": round(beside - alone, 2),
    }


def measure_case(case: str, options: argparse.Namespace, batches: Sequence[int]) -> Iterator[Row]:
    room, max_len = max(batches) + NUM_NEW_SCHEMAS, options.output_len + 128
    is_prepared, usual, new = not options.unprepared, batches[len(batches) // 2], new_structures(NUM_NEW_SCHEMAS)
    client = EngineClient.in_thread(lambda: build(case, options.device, room, max_len, is_prepared))
    try:
        if options.device == "cuda":
            wait_for_graphs(client)
        first = measure_delay(client, case, usual, options.output_len, [StructuredOutput(json=PEOPLE)])
        yield {"case": "grammar-overhead-first", "prepared": is_prepared, **first}
        for batch in batches:
            yield measure(client, case, batch, options.output_len, options.repeat)
        compiling = measure_delay(client, case, usual, options.output_len, new)
        yield {"case": "grammar-overhead-compile", **compiling}
    finally:
        client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--locks", action="store_true", help="measure only for how long Python is locked")
    parser.add_argument("--unprepared", action="store_true", help="the first grammar reads the vocabulary")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    folder, batches = prepare_folder(options.output_dir), [int(batch) for batch in options.batch.split(",")]
    rows: list[Row] = []
    for case in options.cases.split(","):
        for row in [measure_locks(case, options.repeat)] if options.locks else measure_case(case, options, batches):
            rows.append(row)
            print(json.dumps(row), flush=True)
        time.sleep(1)
    print(write_results(collect_results(rows, device=options.device), folder, "grammar-overhead"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
