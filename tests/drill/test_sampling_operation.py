"""A new sampling operation is one file, and one call that registers it.

A toy one lives in this folder. Requests ask for it through ``LLM``, as a value of Python or of JSON; texts with drafts
are those without, and every token keeps the rule of its own position and predecessor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream import LLM, ConfigError, RequestError, SamplingParams, parameters
from slipstream.engine.driver import Add
from slipstream.engine.wire import MalformedRequest, decode, encode
from slipstream.output import RequestOutput
from slipstream.sampling import registry
from slipstream.sampling.operation import Positions, SamplingOperation, SamplingRows, Stage
from slipstream.server.errors import ApiError
from slipstream.server.json_body import read_body
from slipstream.server.params import completion_params
from slipstream.server.protocol import CompletionRequest
from tests import tiny_models
from tests.drill import toy_sampling
from tests.engine.drive import make_request

# Repeating prompts have n-gram drafts, some of which are rejected.
PROMPTS = [[7, 9, 7, 9, 7, 9], [*range(40, 75)], [5] * 19, [200, 3, 200, 3, 200], [11], [8, 9, 7, 8, 9, 7], [7, 8] * 4]
LENGTH = 40
FORBIDDEN = (1, 3)
CLOCK: dict[str, Any] = {"clock_size": 5, "clock_classes": FORBIDDEN}
# Greedy and sampled, with the operation, with another weight of it beside other operations, and without it.
KINDS: list[dict[str, Any]] = [
    CLOCK,
    {"temperature": 1.0, **CLOCK},
    {"temperature": 0.9, "top_n_sigma": 1.5, "repetition_penalty": 1.2, **CLOCK},
    {"temperature": 0.8, "clock_size": 7, "clock_push": 3.5, "top_p": 0.9},
    {},
    # Few tokens are likely, so that texts repeat themselves and drafts from them are often right.
    {"temperature": 1.0, "logit_bias": dict.fromkeys((7, 8, 9, 11), 30.0), **CLOCK},
    {"logit_bias": dict.fromkeys((7, 8, 9), 30.0), **CLOCK},
]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "registered", {})
    monkeypatch.setattr(parameters, "_extra", {})
    registry.register(toy_sampling.OPERATION)


def requested() -> list[SamplingParams]:
    general = {"temperature": 0.0, "seed": 3, "max_tokens": LENGTH, "ignore_eos": True}
    return [SamplingParams.from_dict({**general, **kind}) for kind in KINDS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, and a drafter that is often right: the target with noise in its weights."""
    target, near = tiny_models.build("llama"), tiny_models.build("llama")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in near.parameters():
            weights += 0.01 * weights.std() * torch.randn(weights.shape, generator=generator)
    made = {"target": target, "near": near}
    return {name: str(tiny_models.save(model, tmp_path_factory.mktemp(name))) for name, model in made.items()}


def generate(folders: dict[str, str], **options: Any) -> list[RequestOutput]:
    with LLM(folders["target"], dtype="float64", max_num_seqs=4, **options) as llm:
        outputs = llm.generate(PROMPTS, requested())
        if "speculative_config" in options:
            assert 0 < llm.stats.num_accepted_tokens < llm.stats.num_draft_tokens, "drafts of both kinds"
        assert (llm.stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
        assert llm.stats.num_sync_violations == 0
    return outputs


_PLAIN: list[list[int]] = []


def plain(folders: dict[str, str]) -> list[list[int]]:
    if not _PLAIN:
        _PLAIN.extend(output.token_ids for output in generate(folders))
    return _PLAIN


def broken_rules(outputs: list[list[int]]) -> int:
    """Tokens whose logit was lowered by 100 and that were generated all the same."""
    count = 0
    for prompt, kind, generated in zip(PROMPTS, KINDS, outputs, strict=True):
        if kind.get("clock_classes"):
            text = torch.tensor([*prompt, *generated])
            at = torch.arange(len(prompt), len(text))
            classes = toy_sampling.classes_of(text[at], text[at - 1], at, torch.tensor(kind["clock_size"]))
            count += int(torch.isin(classes, torch.tensor(FORBIDDEN)).sum())
    return count


def drafts(method: str, folders: dict[str, str], **more: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"model": folders["near"]} if method == "draft_model" else {"prompt_lookup_min": 1}
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3, **own, **more}}


SIM: dict[str, Any] = {"device": "sim", "steps_in_flight": 3, "cudagraph_capture_sizes": (4, 8, 16)}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 5, "steps_in_flight": 2},
        {"num_gpu_blocks_override": 7},  # too few for all: requests are preempted
        {**SIM, "cudagraph_mode": "none"},
        {**SIM, "cudagraph_mode": "full"},
        {**SIM, "cudagraph_mode": "full_and_piecewise", "long_prefill_token_threshold": 5},
    ],
    ids=str,
)
def test_the_same_texts_with_drafts(folders: dict[str, str], method: str, options: dict[str, Any]) -> None:
    found = [output.token_ids for output in generate(folders, **drafts(method, folders), **options)]
    assert found == plain(folders)


def test_the_same_texts_in_graphs_without_drafts(folders: dict[str, str]) -> None:
    assert [o.token_ids for o in generate(folders, **SIM, cudagraph_mode="full")] == plain(folders)


def test_every_token_keeps_the_rule_of_its_own_history(folders: dict[str, str]) -> None:
    assert broken_rules(plain(folders)) == 0
    assert all(len(set(generated)) > 4 for generated in plain(folders)[:4]), "a stuck model would prove little"
    # The rule says something: a request without it breaks it.
    general = {"temperature": 0.0, "seed": 3, "max_tokens": LENGTH, "ignore_eos": True}
    with LLM(folders["target"], dtype="float64", max_num_seqs=4) as llm:
        free = llm.generate(PROMPTS, SamplingParams.from_dict(general))
    assert broken_rules([output.token_ids for output in free]) > 10


def test_rejection_draws_from_the_pushed_distribution(folders: dict[str, str]) -> None:
    found = [o.token_ids for o in generate(folders, **drafts("draft_model", folders, verify="rejection"))]
    assert broken_rules(found) == 0
    greedy = [i for i, kind in enumerate(KINDS) if not kind.get("temperature")]
    assert [found[i] for i in greedy] == [plain(folders)[i] for i in greedy]


# --- faults that the drill must find ------------------------------------------------------------------


def _history_of_the_first(logits: Tensor, rows: SamplingRows, at: Positions) -> Tensor:
    """Planted: every draft of a row is judged with the history of the row's first."""
    first = at.positions.clone()
    first[1:] = torch.where(at.rows[1:] == at.rows[:-1], first[:-1], first[1:])
    return toy_sampling.OPERATION.apply(logits, rows, at._replace(positions=first))


def _rows_in_order(logits: Tensor, rows: SamplingRows, at: Positions) -> Tensor:
    """Planted: the parameters are those of another row."""
    own = at.rows.roll(1)
    return toy_sampling.OPERATION.apply(logits, rows, at._replace(rows=own))


@pytest.mark.parametrize("fault", [_history_of_the_first, _rows_in_order])
def test_the_drill_finds(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Tensor]
) -> None:
    expected = plain(folders)
    broken = dataclasses.replace(toy_sampling.OPERATION, apply=fault)
    monkeypatch.setattr(registry, "registered", {broken.name: broken})
    found = [output.token_ids for output in generate(folders, **drafts("ngram", folders))]
    assert found != expected and broken_rules(found) > 0


# --- names and values ---------------------------------------------------------------------------------


def test_values_are_checked_and_names_have_hints() -> None:
    assert SamplingParams(extra={"clock_size": 5, "clock_push": None}).extra == {"clock_size": 5}
    for values, message in (
        ({"clock_size": 65}, "clock_size must be an integer of at least 0 and at most 64, not 65"),
        ({"clock_push": "far"}, "clock_push must be a number"),
        ({"clock_classes": [1, 2, 3, 4]}, "clock_classes has 4 entries; at most 3 are supported"),
        ({"clock_sise": 1}, r"unknown sampling parameter 'clock_sise'; did you mean 'clock_size'\?"),
        ({"extra": {"clock_pish": 1}}, r"unknown sampling parameter 'clock_pish'; did you mean 'clock_push'\?"),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams.from_dict(values)
    with pytest.raises(RequestError, match="clock_size is no field of SamplingParams; give extra="):
        SamplingParams(clock_size=5)


def read(body: str) -> SamplingParams:
    return completion_params(read_body(body.encode(), b"application/json", False, CompletionRequest))


def test_the_server_takes_the_names() -> None:
    body = '{"prompt": "x", "clock_size": 5, "extra": {"clock_push": 2}, "top_n_sigma": 1.5, "clock_classes": null}'
    params = read(body)
    assert params.extra == {"clock_size": 5, "clock_push": 2.0} and params.top_n_sigma == 1.5
    with pytest.raises(ApiError, match="unknown field 'clock_sise'; did you mean 'clock_size'"):
        read('{"prompt": "x", "clock_sise": 5}')
    with pytest.raises(RequestError, match="clock_size must be an integer"):
        read('{"prompt": "x", "clock_size": "5"}')


def test_values_travel_to_the_engines_process(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request("a", [1, 2], extra=CLOCK, temperature=0.5)
    frames = encode(Add(request))
    assert decode(frames).request.params.extra == CLOCK
    # One that has not registered the operation refuses the request, and goes on.
    monkeypatch.setattr(parameters, "_extra", {})
    with pytest.raises(MalformedRequest, match="unknown sampling parameter 'clock_size'"):
        decode(frames)


def test_an_engine_in_a_process_of_its_own_has_the_operation(folders: dict[str, str]) -> None:
    pytest.importorskip("zmq")
    assert [o.token_ids for o in generate(folders, own_process=True)] == plain(folders)


def test_a_file_that_cannot_be_found_is_said_to_be_missing() -> None:
    with pytest.raises(ConfigError, match=r"cannot import the sampling operation in nowhere.at_all .* PYTHONPATH"):
        registry.register_modules(["nowhere.at_all"])


def test_an_engine_that_is_older_than_an_operation_refuses_it(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "registered", {})
    with LLM(folders["target"], dtype="float64", max_num_seqs=2) as llm:
        registry.register(toy_sampling.OPERATION)
        output = llm.generate([5, 6], SamplingParams(max_tokens=3, extra={"clock_size": 5}))[0]
        assert output.error is not None and "no sampling parameter 'clock_size'; register its operation" in output.error
        assert len(llm.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    with LLM(folders["target"], dtype="float64", max_num_seqs=2, device="cpu") as llm:
        assert llm.generate([5, 6], SamplingParams(max_tokens=3, extra={"clock_size": 5}))[0].error is None


def test_what_does_not_fit_the_model_is_refused() -> None:
    request = make_request("a", [1], extra={"clock_size": 9})
    registry.check_request(request, 10)
    with pytest.raises(RequestError, match="clock_size must be below the vocabulary's 9"):
        registry.check_request(request, 9)


# --- the registry -------------------------------------------------------------------------------------


def test_the_order_is_by_stage_and_what_comes_after_what() -> None:
    names = [operation.name for operation in registry.operations()]
    assert names == [
        *("logit_bias", "bad_words", "min_tokens", "suppress_tokens", "timestamp_rules", "penalties", "clock"),
        *("top_n_sigma", "temperature", "top_k", "top_p", "min_p"),
    ]
    assert [o.name for o in registry.in_order(reversed(registry.operations()))] == names


def made(name: str, *after: str) -> SamplingOperation:
    return dataclasses.replace(toy_sampling.OPERATION, name=name, stage=Stage.POSITION, after=after, parameters=())


def test_what_contradicts_is_refused() -> None:
    with pytest.raises(ValueError, match="come after each other: a, b"):
        registry.in_order((made("a", "b"), made("b", "a")))
    with pytest.raises(ValueError, match="two sampling operations are called top_k"):
        registry.register(made("top_k"))
    with pytest.raises(ValueError, match="two sampling operations are called clock"):
        registry.register(made("clock"))
    other = dataclasses.replace(toy_sampling.SIZE, default=1)
    with pytest.raises(ValueError, match="two sampling parameters are called clock_size"):
        registry.register(dataclasses.replace(made("a"), parameters=(other,)))


def test_the_package_knows_none_of_this() -> None:
    for path in Path(slipstream.__file__).parent.rglob("*.py"):
        assert "clock_" not in path.read_text().replace("clock_gettime", ""), path


def test_an_operation_of_the_package_is_named_in_its_own_file_alone() -> None:
    """But for the field of ``SamplingParams``, which is written from there."""
    root = Path(slipstream.__file__).parent
    named = {str(path.relative_to(root)) for path in root.rglob("*.py") if "top_n_sigma" in path.read_text()}
    assert named == {"sampling/top_n_sigma.py", "sampling_params.py"}
