"""Timestamp rules against the logits processor of ``transformers``, at every position of many histories."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from slipstream.errors import RequestError
from slipstream.sampling.operation import Positions
from slipstream.sampling.registry import check_request
from slipstream.sampling.sampler import SamplingNeeds, process
from tests.sampling.rows import make_request, make_rows

END, NO_TIMESTAMPS, FIRST, LAST_INITIAL, VOCAB = 40, 44, 45, 50, 80
RULES = (FIRST, NO_TIMESTAMPS, END, LAST_INITIAL)
PROMPT = [41, 42, 43]
# Text, times and both, of outputs that keep the rules and of some that do not.
KINDS = {"t": 9, "u": 30, "a": FIRST, "b": FIRST + 4, "c": FIRST + 9, "z": VOCAB - 1, "e": END}
HISTORIES = sorted(
    {"".join(kinds) for length in range(4) for kinds in itertools.product("tab", repeat=length)}
    | {"attb", "attbb", "attbbu", "attbbuc", "attbbucc", "attbbuccz", "azz", "e", "ae", "az", "atz", "uuuu", "atutb"}
)


def expected(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
    config = GenerationConfig(
        eos_token_id=END,
        bos_token_id=END,
        no_timestamps_token_id=NO_TIMESTAMPS,
        max_initial_timestamp_index=LAST_INITIAL - FIRST,
    )
    config._detect_timestamp_from_logprob = True
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    return processor(torch.tensor([PROMPT + output]), logits[None].clone())[0]


def draw_logits(kind: str) -> torch.Tensor:
    logits = torch.randn(VOCAB)
    logits[FIRST:] += {"text": -8.0, "times": 8.0, "even": 0.0, "sum": -0.5}[kind]
    if kind == "sum":  # no single time is likelier than the likeliest text, and all together are
        logits[9] = logits[FIRST:].logsumexp(0) - 0.3
    return logits


@pytest.mark.parametrize("kind", ["text", "times", "even", "sum"])
def test_equals_transformers(kind: str) -> None:
    outputs = [[KINDS[name] for name in history] for history in HISTORIES]
    logits = torch.stack([draw_logits(kind) for _ in outputs])
    request = make_request(PROMPT, timestamp_rules=RULES)
    rows, at, needs = make_rows([request] * len(outputs), [PROMPT + output for output in outputs])
    assert needs.operations == {"timestamp_rules"}
    found = process(logits, rows, at, needs)
    for history, output, own, row in zip(HISTORIES, outputs, logits, found, strict=True):
        assert torch.equal(row, expected(own, output)), history


def test_after_each_draft_the_history_is_what_it_really_is() -> None:
    """One row at several positions, as when drafts are verified: what comes later in the row is not history."""
    output = [KINDS[name] for name in "attbbuuccz"]
    request = make_request(PROMPT, timestamp_rules=RULES)
    rows, at, needs = make_rows([request], [PROMPT + output])
    count = len(output) + 1
    positions = Positions(at.rows.expand(count), torch.arange(len(PROMPT), len(PROMPT) + count, dtype=torch.int32))
    logits = torch.randn(count, VOCAB)
    found = process(logits, rows, positions, needs)
    for idx in range(count):
        assert torch.equal(found[idx], expected(logits[idx], output[:idx])), idx


def test_rows_without_rules_stay_as_they_are() -> None:
    logits = torch.randn(3, VOCAB)
    requests = [make_request([1, 2]), make_request(PROMPT, timestamp_rules=RULES), make_request([1])]
    former = make_request([1], timestamp_rules=RULES)
    rows, at, needs = make_rows(requests, [[1, 2], PROMPT, [1, 50]], before=(former, [1]))
    found = process(logits, rows, at, needs)
    assert torch.equal(found[0], logits[0]) and torch.equal(found[2], logits[2])
    assert torch.equal(found[1], expected(logits[1], []))


def test_after_suppressed_tokens() -> None:
    """The likeliest text is one that may be drawn: times win over what is left."""
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 9], logits[0, 20], logits[0, FIRST + 3] = 9.0, 1.0, 2.0
    output = [FIRST, 30]
    request = make_request(PROMPT, timestamp_rules=RULES, suppress_tokens=[9])
    rows, at, needs = make_rows([request], [PROMPT + output])
    found = process(logits, rows, at, needs)[0]
    assert torch.isfinite(found).nonzero().flatten().tolist() == list(range(FIRST + 1, VOCAB))


@pytest.mark.parametrize("given", [(45,), (45, 44, 40), (44, 45, 40, 50), (45, 44, 40, 44), (45, 39, 40, 50)])
def test_refusals(given: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="timestamp_rules must be the token ids first_timestamp, no_timestamps"):
        check_request(make_request([1], timestamp_rules=given), VOCAB)


def test_who_needs_them() -> None:
    assert not SamplingNeeds.for_request(make_request([1])).operations
    check_request(make_request([1], timestamp_rules=RULES), VOCAB)
    with pytest.raises(RequestError, match="not a token id below 80"):
        check_request(make_request([1], timestamp_rules=(80, 44, 40, 81)), VOCAB)
