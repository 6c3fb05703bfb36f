"""Constrained requests through the whole engine: documents conform, and drafts change no token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import llguidance
import pytest

from slipstream import LLM, AsyncLLM, RequestError, SamplingParams, StructuredOutput
from slipstream.config import EngineOptions
from slipstream.engine import worker
from slipstream.engine.build import build_engine, build_serving_engine
from slipstream.grammar import guidance
from slipstream.grammar.guidance import find_refusal, grammar_of
from slipstream.output import Completion, DraftStats
from tests import tiny_models
from tests.models.heads import tiny_heads

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}, "is": {"enum": ["a", 1]}},
    "required": ["name", "is"],
    "additionalProperties": False,
}
SAMPLE = [
    json.loads(line)["schema"]
    for line in Path(__file__).with_name("json_schema_bench.jsonl").read_text(encoding="utf-8").splitlines()[::12]
]
SCHEMAS = [PERSON, True, *(schema for schema in SAMPLE if find_refusal(StructuredOutput(json=schema)) is None)]
OTHERS = [
    StructuredOutput(regex="[a-f]{2,5}(-[0-9]{1,3})?"),
    StructuredOutput(choice=["yes", "no", "perhaps"]),
    StructuredOutput(grammar='start: "(" start ")" | /[xy]{1,3}/'),
]
# Every sampling parameter that may meet a grammar, request by request.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.2, "min_tokens": 6},
    {"temperature": 1.0, "n": 2, "stop": ("q",)},
    {"temperature": 0.0, "ignore_eos": True},
]


class Served(NamedTuple):
    structure: StructuredOutput
    params: SamplingParams
    completions: list[Completion]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a head for it; both random."""
    model = tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS)
    target = tiny_models.save(model, tmp_path_factory.mktemp("target"))
    return target, tiny_heads.eagle3(body={"max_position_embeddings": 512}).write(tmp_path_factory.mktemp("head"))


Serve = Callable[..., list[Served]]


@pytest.fixture(scope="module")
def serve(folders: tuple[Path, Path]) -> Serve:
    """All requests at once; options of the engine change nothing of their texts."""

    def run(drafter: str, max_tokens: int = 40, drafts: list[DraftStats] | None = None, **options: Any) -> list[Served]:
        config = None if drafter == "none" else {"method": drafter, "num_speculative_tokens": 3}
        if config is not None and drafter == "eagle3":
            config["model"] = str(folders[1])
        structures = [*(StructuredOutput(json=schema) for schema in SCHEMAS), *OTHERS]
        params = [
            SamplingParams(max_tokens=max_tokens, seed=i, structured=structure, **KINDS[i % len(KINDS)])
            for i, structure in enumerate(structures)
        ]
        free = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=99)
        chosen = {"dtype": "float64", "max_num_seqs": 32, **options}
        with LLM(str(folders[0]), speculative_config=config, **chosen) as llm:
            outputs = llm.generate([f"document {i}: " for i in range(len(params) + 1)], [*params, free])
            assert llm.stats.num_masked_steps > 0
            assert drafter == "none" or llm.stats.num_draft_tokens > 0
            if drafts is not None:
                drafts.append(llm.stats.drafts)
        assert [output.error for output in outputs] == [None] * len(outputs)
        found = [Served(*pair, output.outputs) for *pair, output in zip(structures, params, outputs, strict=False)]
        return [*found, Served(StructuredOutput(choice=["free"]), free, outputs[-1].outputs)]

    return run


@pytest.fixture(scope="module")
def plain(serve: Serve) -> list[Served]:
    return serve("none")


def texts_of(served: Sequence[Served]) -> list[list[tuple[str, list[int], str | None]]]:
    return [[(c.text, c.token_ids, c.finish_reason) for c in one.completions] for one in served]


def test_documents_conform_and_the_others_are_legal_so_far(plain: list[Served], folders: tuple[Path, Path]) -> None:
    # The library's own reading of the tokenizer's file, not ours.
    tokenizer = (folders[0] / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = llguidance.LLTokenizer(tokenizer, n_vocab=tiny_models.VOCAB_SIZE, eos_token=tiny_models.EOS_ID)
    num_finished = 0
    for structure, params, completions in plain[:-1]:
        for completion in completions:
            matcher = llguidance.LLMatcher(vocabulary, grammar_of(structure))
            ends = completion.token_ids[-1] == tiny_models.EOS_ID
            legal = completion.token_ids[: len(completion.token_ids) - ends]
            assert matcher.validate_tokens(legal) == len(legal), (structure, completion.text)
            matcher.consume_tokens(legal)
            assert not ends or matcher.is_accepting(), (structure, completion.text)
            assert (completion.finish_reason == "stop") == (ends or completion.stop_reason in params.stop)
            if ends and structure.json is not None:
                schema, document = json.loads(structure.json), json.loads(completion.text)
                jsonschema.validators.validator_for(schema)(schema).validate(document)
            num_finished += ends
    assert num_finished > len(plain) // 4


@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_the_same_text_with_drafts(serve: Serve, plain: list[Served], drafter: str) -> None:
    assert texts_of(serve(drafter, steps_in_flight=2)) == texts_of(plain)


def test_tokens_that_are_certain_are_always_accepted(serve: Serve, plain: list[Served]) -> None:
    """A drafter that proposes nothing else."""
    drafts: list[DraftStats] = []
    assert texts_of(serve("certain_tokens", drafts=drafts, steps_in_flight=2)) == texts_of(plain)
    assert drafts[0].num_accepted == drafts[0].num_drafts > 20


def test_what_the_first_grammar_needs_is_done_before_an_engine_serves(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a vocabulary holds up every other thread, so no request may be there."""
    read, num_read = guidance._read_vocabulary, list[int]()
    monkeypatch.setattr(guidance, "_read_vocabulary", lambda *args: [num_read.append(1), read(*args)][1])
    options = EngineOptions(model=str(folders[0]), device="cpu")
    build_engine(options)
    assert not num_read
    engine = build_serving_engine(options)
    assert len(num_read) == 1
    with LLM(build=lambda: engine) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=9, structured={"choice": ["ab"]}))[0].text == "ab"
    assert len(num_read) == 1 and worker.build_serving_engine is build_serving_engine
    AsyncLLM(str(folders[0]), device="cpu").close()
    assert len(num_read) == 2


def test_the_same_text_in_small_steps_and_under_preemption(serve: Serve, plain: list[Served]) -> None:
    options = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 48, "max_num_seqs": 6}
    assert texts_of(serve("eagle3", steps_in_flight=3, **options)) == texts_of(plain)


def test_a_refused_schema_raises_and_the_engine_goes_on(folders: tuple[Path, Path]) -> None:
    with LLM(str(folders[0]), dtype="float64", own_process=True) as llm:
        with pytest.raises(RequestError, match="uniqueItems"):
            llm.generate("x", SamplingParams(structured={"json": {"type": "array", "uniqueItems": True}}))
        output = llm.generate("x", SamplingParams(max_tokens=30, structured={"choice": ["yes", "no"]}))[0]
        assert output.text in ("yes", "no") and output.finish_reason == "stop"


def test_parameters_that_forbid_all_that_is_legal_end_the_request_with_an_error(folders: tuple[Path, Path]) -> None:
    with LLM(str(folders[0]), dtype="float64") as llm:
        structured = {"choice": ["ab"]}
        output = llm.generate("x", SamplingParams(max_tokens=5, bad_words=("a",), structured=structured))[0]
        assert output.finish_reason == "error" and output.error is not None
        assert llm.generate("x", SamplingParams(max_tokens=5, structured=structured))[0].text == "ab"
