"""A sample of JSONSchemaBench: every schema is served or refused, and what is served conforms, with drafts or without.

    python benchmarks/json_schema_bench.py smollm2-135m --max-tokens 1024 --state bench.jsonl
    python benchmarks/json_schema_bench.py smollm2-135m --ways none,eagle3,ngram --temperatures 0,1 --max-tokens 96
    python benchmarks/json_schema_bench.py tiny --ways none,eagle3,ngram,certain_tokens --temperatures 0,1

`tiny` is a model of a few layers with random weights, and a head that is random as well. 32 requests run at once. A
finished document is validated by `jsonschema`, which knows nothing of grammars; of one that reached the limit every
token must be legal for a matcher of its own. Texts with drafts must be those without.

`tokens_a_step`: what a request gets of a step in the mean. `--without-certain`: no token is drafted because it is
certain.

With `--state` each answer is kept in a file, and a run that was interrupted goes on where it stopped. The exit status
is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import llguidance

from json_schema_prompts import PROMPTS, messages_for
from slipstream import LLM, RequestError, SamplingParams, StructuredOutput
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.grammar.guidance import find_refusal, grammar_of
from slipstream.grammar.walk import GrammarWalk

SCHEMAS = Path(__file__).parents[1] / "tests/grammar/json_schema_bench.jsonl"
AT_ONCE = 32


class Entry(NamedTuple):
    schema_id: str
    schema: dict[str, Any]


class Run(NamedTuple):
    way: str  # of drafting
    temperature: float
    max_tokens: int


class Target(NamedTuple):
    """A model, and how it is asked."""

    model: str
    head: Path | None  # of a model that has none of its own
    max_model_len: int
    is_tiny: bool
    asking: str  # one of PROMPTS
    is_compact: bool  # no whitespace between the parts of a document

    def open(self, way: str, device: str) -> LLM:
        shared = {"device": device, "max_model_len": self.max_model_len, "max_num_seqs": AT_ONCE}
        if self.is_tiny:
            shared["dtype"] = "float64"
        if way == "none":
            return LLM(self.model, speculate="none", **shared)
        speculative: dict[str, Any] = {"method": way, "num_speculative_tokens": 3}
        if way == "eagle3" and self.head is not None:
            speculative["model"] = str(self.head)
        elif way == "eagle3":
            return LLM(self.model, speculate=way, k=3, **shared)  # the head that ships with the model
        return LLM(self.model, speculative_config=speculative, **shared)

    def structure(self, entry: Entry) -> StructuredOutput:
        return StructuredOutput(json=entry.schema, disable_any_whitespace=self.is_compact)

    def prompt(self, llm: LLM, entry: Entry) -> list[int]:
        if self.is_tiny:
            return llm.tokenizer.encode(f"{entry.schema_id}: ")
        return llm.tokenizer.encode_chat(messages_for(entry.schema, self.asking))


Answers = dict[tuple[Run, str], dict[str, Any]]


def read_schemas(limit: int | None) -> list[Entry]:
    lines = [json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]
    step = 1 if limit is None else max(1, len(lines) // limit)
    return [Entry(line["id"], line["schema"]) for line in lines[::step]][:limit]


def read_state(path: Path | None) -> Answers:
    if path is None or not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {(Run(*line["run"]), line["id"]): line for line in lines}


def _chunks(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Each is spread over all, so that what an interrupted run has done is like the rest."""
    count = -(-len(entries) // AT_ONCE)
    for start in range(count):
        yield entries[start::count]


def serve(llm: LLM, target: Target, run: Run, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    params = [
        SamplingParams(
            temperature=run.temperature,
            seed=zlib.crc32(entry.schema_id.encode()),
            max_tokens=run.max_tokens,
            structured=target.structure(entry),
        )
        for entry in entries
    ]
    outputs = llm.generate([target.prompt(llm, entry) for entry in entries], params)
    return [
        {
            "run": list(run),
            "id": entry.schema_id,
            "text": output.text,
            "token_ids": output.token_ids,
            "reason": output.finish_reason,
            "error": output.error,
            "accepted": output.speculation.num_accepted if output.speculation else 0,
        }
        for entry, output in zip(entries, outputs, strict=True)
    ]


def find_fault(target: Target, entry: Entry, answer: dict[str, Any], vocabulary: Any) -> str | None:
    """What is wrong with an answer."""
    if answer["error"] is not None:
        return str(answer["error"])
    if answer["reason"] == "stop":
        try:
            document = json.loads(answer["text"])
        except ValueError as error:
            return f"is no JSON: {error}"
        kind = jsonschema.validators.validator_for(entry.schema, default=jsonschema.Draft202012Validator)
        return next((error.message for error in kind(entry.schema).iter_errors(document)), None)
    matcher = llguidance.LLMatcher(vocabulary, grammar_of(target.structure(entry)))
    num_legal = matcher.validate_tokens(answer["token_ids"])
    return None if num_legal == len(answer["token_ids"]) else f"token {num_legal} is not legal"


def answer_all(llm: LLM, target: Target, run: Run, work: tuple[Sequence[Entry], Answers, Path | None]) -> None:
    """Answers that are not yet there, a batch at a time; they are kept in the state's file."""
    served, answers, state = work
    for whole in _chunks(served):
        chunk = [entry for entry in whole if (run, entry.schema_id) not in answers]
        if not chunk:
            continue
        begun = time.monotonic()
        found = serve(llm, target, run, chunk)
        answers |= {(run, answer["id"]): answer for answer in found}
        if state is not None:
            with state.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(answer) + "\n" for answer in found)
        passed = time.monotonic() - begun
        num_finished = sum(answer["reason"] == "stop" for answer in found)
        print(f"{run.way}, {run.temperature}: {num_finished} of {len(found)} finished, {passed:.0f} s", flush=True)


@contextmanager
def open_target(model: str, max_tokens: int, asking: str, is_compact: bool) -> Iterator[Target]:
    if model != "tiny":
        yield Target(model, None, 2048 + max_tokens, False, asking, is_compact)
        return
    from tests import tiny_models
    from tests.models.heads import tiny_heads

    with tempfile.TemporaryDirectory() as name:
        length, folder = 64 + max_tokens, Path(name)
        made = tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS)
        (folder / "head").mkdir()
        tiny = tiny_models.save(made, folder / "target")
        head = tiny_heads.eagle3(body={"max_position_embeddings": 2 * length}).write(folder / "head")
        yield Target(str(tiny), head, length, True, "the name of the schema", is_compact)


def describe(
    target: Target, run: Run, entries: Sequence[Entry], served: Sequence[Entry], answers: Answers, vocabulary: Any
) -> Row:
    own = {entry.schema_id: answers[run, entry.schema_id] for entry in served}
    faults = {
        e.schema_id: fault for e in served if (fault := find_fault(target, e, own[e.schema_id], vocabulary)) is not None
    }
    finished = [answer for answer in own.values() if answer["reason"] == "stop"]
    plain = run._replace(way="none")
    different = [
        i for i, answer in own.items() if (plain, i) in answers and answer["text"] != answers[plain, i]["text"]
    ]
    return {
        "case": "json-schema-bench",
        "batch": AT_ONCE,
        "drafts": run.way,
        "temperature": run.temperature,
        "max_tokens": run.max_tokens,
        "schemas": len(entries),
        "served": len(served),
        "refused": len(entries) - len(served),
        "finished": len(finished),
        "valid": sum(answer["id"] not in faults for answer in finished),
        "unfinished": len(own) - len(finished),
        "legal_prefixes": sum(i not in faults for i, answer in own.items() if answer["reason"] == "length"),
        "different_from_plain": len(different),
        "accepted_drafts": sum(answer["accepted"] for answer in own.values()),
        "tokens": (num_tokens := sum(len(answer["token_ids"]) for answer in own.values())),
        "tokens_a_step": round(num_tokens / (num_tokens - sum(answer["accepted"] for answer in own.values())), 4),
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ways", default="none", help="drafters: none, eagle3, ngram; none comes first")
    parser.add_argument("--temperatures", default="0")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--limit", type=int, help="so many schemas, spread over all")
    parser.add_argument("--state", type=Path, help="a file that keeps the answers of an interrupted run")
    parser.add_argument("--prompt", choices=PROMPTS, default=PROMPTS[0], help="how the model is asked")
    parser.add_argument("--compact", action="store_true", help="documents without whitespace")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--without-certain", action="store_true", help="draft no tokens because they are certain")
    parser.add_argument("--output-dir", type=Path, help="where the result goes; not written if left out")
    options = parser.parse_args()
    folder = None if options.output_dir is None else prepare_folder(options.output_dir)
    entries = read_schemas(options.limit)
    refusals = {entry.schema_id: find_refusal(StructuredOutput(json=entry.schema)) for entry in entries}
    served = [entry for entry in entries if refusals[entry.schema_id] is None]
    print(f"{len(entries)} schemas: {len(served)} served, {len(entries) - len(served)} refused", flush=True)
    if options.without_certain:
        GrammarWalk.follow_certain = lambda _self, _walkers: []  # type: ignore[method-assign]
    answers, rows = read_state(options.state), []
    with open_target(options.model, options.max_tokens, options.prompt, options.compact) as target:
        for way in options.ways.split(","):
            runs = [Run(way, float(temperature), options.max_tokens) for temperature in options.temperatures.split(",")]
            with target.open(way, options.device) as llm:
                vocabulary = _open_vocabulary(llm)
                for entry in entries:  # the engine refuses what the check refuses, with the same reason
                    if refusals[entry.schema_id] is not None:
                        _check_refusal(llm, entry, refusals[entry.schema_id])
                for run in runs:
                    answer_all(llm, target, run, (served, answers, options.state))
                    row = describe(target, run, entries, served, answers, vocabulary)
                    how = {"prompt": target.asking, "compact": target.is_compact}
                    rows.append({**row, "model": options.model, **how, "certain_tokens": not options.without_certain})
                    print(json.dumps(rows[-1]), flush=True)
    if folder is not None:
        rows.append(
            {"case": "json-schema-bench-refused", "batch": 0, "reasons": {i: r for i, r in refusals.items() if r}}
        )
        print(write_results(collect_results(rows, device=options.device), folder, "json-schema-bench"))
    return int(any(row.get("faults") or row.get("different_from_plain") for row in rows))


def _check_refusal(llm: LLM, entry: Entry, reason: str | None) -> None:
    try:
        llm.generate("x", SamplingParams(max_tokens=1, structured=StructuredOutput(json=entry.schema)))
    except RequestError as error:
        assert str(error) == reason, f"{entry.schema_id}: {error}"
    else:
        raise AssertionError(f"{entry.schema_id} was not refused")


def _open_vocabulary(llm: LLM) -> Any:
    """The library's own reading of the tokenizer's file, not the engine's."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        llm.tokenizer.save(file)
        text = file.read_text(encoding="utf-8")
    return llguidance.LLTokenizer(text, n_vocab=llm.config.model.vocab_size, eos_token=llm.tokenizer.eos_token_id)


if __name__ == "__main__":
    sys.exit(main())
