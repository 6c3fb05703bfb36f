"""A sample of JSONSchemaBench: every schema is served or refused, and what is served conforms, with drafts or without.

    python benchmarks/json_schema_bench.py smollm2-135m --max-tokens 1024 --state bench.jsonl
    python benchmarks/json_schema_bench.py smollm2-135m --ways none,eagle3,ngram --temperatures 0,1 --max-tokens 96

32 requests run at once. A finished document is validated by `jsonschema`, which knows nothing of grammars; of one that
reached the limit every token must be legal for a matcher of its own. Texts with drafts must be those without.

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
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import llguidance

from slipstream import LLM, RequestError, SamplingParams, StructuredOutput
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.grammar.guidance import find_refusal, grammar_of

SCHEMAS = Path(__file__).parents[1] / "tests/grammar/json_schema_bench.jsonl"
AT_ONCE = 32
_PROMPT = "Write one JSON document that conforms to this schema, with short values.\n\n%s"
_PROMPT_LENGTH = 1500  # characters of the schema: the grammar has all of it


class Entry(NamedTuple):
    schema_id: str
    schema: dict[str, Any]


class Run(NamedTuple):
    way: str  # of drafting
    temperature: float
    max_tokens: int


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
    for start in range(0, len(entries), AT_ONCE):
        yield entries[start : start + AT_ONCE]


def serve(llm: LLM, run: Run, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    messages = [[{"role": "user", "content": _PROMPT % json.dumps(e.schema)[:_PROMPT_LENGTH]}] for e in entries]
    params = [
        SamplingParams(
            temperature=run.temperature,
            seed=zlib.crc32(entry.schema_id.encode()),
            max_tokens=run.max_tokens,
            structured=StructuredOutput(json=entry.schema),
        )
        for entry in entries
    ]
    outputs = llm.chat(messages, params)
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


def find_fault(entry: Entry, answer: dict[str, Any], vocabulary: Any) -> str | None:
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
    matcher = llguidance.LLMatcher(vocabulary, grammar_of(StructuredOutput(json=entry.schema)))
    num_legal = matcher.validate_tokens(answer["token_ids"])
    return None if num_legal == len(answer["token_ids"]) else f"token {num_legal} is not legal"


def describe(run: Run, entries: Sequence[Entry], served: Sequence[Entry], answers: Answers, vocabulary: Any) -> Row:
    own = {entry.schema_id: answers[run, entry.schema_id] for entry in served}
    faults = {e.schema_id: fault for e in served if (fault := find_fault(e, own[e.schema_id], vocabulary)) is not None}
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
        "tokens": sum(len(answer["token_ids"]) for answer in own.values()),
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
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output-dir", type=Path, help="where the result goes; not written if left out")
    options = parser.parse_args()
    folder = None if options.output_dir is None else prepare_folder(options.output_dir)
    entries = read_schemas(options.limit)
    refusals = {entry.schema_id: find_refusal(StructuredOutput(json=entry.schema)) for entry in entries}
    served = [entry for entry in entries if refusals[entry.schema_id] is None]
    print(f"{len(entries)} schemas: {len(served)} served, {len(entries) - len(served)} refused", flush=True)
    answers, rows, vocabulary = read_state(options.state), [], None
    for way in options.ways.split(","):
        drafting = {} if way == "none" else {"k": 3}
        with LLM(
            options.model,
            device=options.device,
            max_model_len=2048 + options.max_tokens,
            max_num_seqs=AT_ONCE,
            speculate=way,
            **drafting,
        ) as llm:
            vocabulary = vocabulary or _open_vocabulary(llm)
            for entry in entries:  # the engine refuses what the check refuses, with the same reason
                if refusals[entry.schema_id] is not None:
                    _check_refusal(llm, entry, refusals[entry.schema_id])
            for temperature in map(float, options.temperatures.split(",")):
                run = Run(way, temperature, options.max_tokens)
                for chunk in _chunks(served):
                    missing = [entry for entry in chunk if (run, entry.schema_id) not in answers]
                    begun = time.monotonic()
                    found = serve(llm, run, missing) if missing else []
                    answers |= {(run, answer["id"]): answer for answer in found}
                    if options.state is not None:
                        with options.state.open("a", encoding="utf-8") as file:
                            file.writelines(json.dumps(answer) + "\n" for answer in found)
                    print(
                        f"{way}, temperature {temperature}: {len(found)} in {time.monotonic() - begun:.0f} s",
                        flush=True,
                    )
                rows.append(describe(run, entries, served, answers, vocabulary))
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
