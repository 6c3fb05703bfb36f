"""Batches cut at any token: the halves' metadata against the tokens themselves, and outputs against whole steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.attention.encoder import EncoderSpec
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.cache_spec import GroupedQuerySpec
from slipstream.config import EngineOptions
from slipstream.engine import build
from slipstream.engine.core import EngineCore
from slipstream.runner.input_batch import InputBatch
from slipstream.runner.micro_batches import Splitter, split_batch
from slipstream.runner.program import StepProgram
from tests import tiny_models
from tests.engine.drive import make_request
from tests.models import tiny_encoders

MAX_LEN = 64


def draw_batch(rng: random.Random, has_exact: bool = False) -> CommonAttentionMetadata:
    """Prompts, decodes with drafts of which some slots are unused, and rows that do not run, near the limit too."""
    num_reqs, rows = rng.randint(1, 6), []
    for _ in range(num_reqs):
        num_drafts = rng.choice([0, 0, 1, 3, 7])
        planned = 1 + num_drafts if num_drafts else rng.choice([1, rng.randint(1, 20)])
        used = planned - rng.randint(0, num_drafts)
        computed = rng.choice([0, rng.randint(0, MAX_LEN - used), MAX_LEN - used])
        # With drafts in flight the host takes the request to be longer than it is.
        bound = min(MAX_LEN, computed + planned + (rng.randint(0, 8) if num_drafts else 0))
        runs = rng.random() < 0.85
        rows.append((planned, used if runs else 0, computed + used if runs else 0, bound, num_drafts, computed))
    planned, used, lens, bounds, drafts, computed = (
        np.array(column, dtype=np.int32) for column in zip(*rows, strict=True)
    )
    starts = np.concatenate([[0], np.cumsum(planned)]).astype(np.int32)
    return CommonAttentionMetadata(
        num_reqs=num_reqs,
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(planned.max()),
        query_start_loc=torch.from_numpy(starts.copy()),
        query_start_loc_cpu=starts,
        query_lens=torch.from_numpy(used),
        seq_lens=torch.from_numpy(lens),
        seq_lens_cpu_upper_bound=bounds,
        block_table=torch.arange(num_reqs * 4, dtype=torch.int32).view(num_reqs, 4),
        slot_mapping=torch.arange(int(starts[-1])),
        batch_rows=torch.tensor(rng.sample(range(10), num_reqs), dtype=torch.int32),
        num_drafts_cpu=drafts,
        num_decodes=next((i for i in range(num_reqs) if not planned[0] == planned[i] == 1 + drafts[i]), num_reqs),
        num_computed_cpu=computed if has_exact else None,
        seq_starts=torch.arange(num_reqs, dtype=torch.int32) if rng.random() < 0.3 else None,
    )


def used_tokens(common: CommonAttentionMetadata) -> dict[int, tuple[int, int]]:
    """Row and position of each token in use, by its slot. Positions are what a layer makes of lengths."""
    found = {}
    columns = (common.batch_rows, common.query_start_loc, common.query_lens, common.seq_lens)
    rows, starts, lens, ends = (column.tolist() for column in columns if column is not None)
    for row, start, count, end in zip(rows, starts[:-1], lens, ends, strict=True):
        for j in range(count):
            found[int(common.slot_mapping[start + j])] = (row, end - count + j)
    return found


def check_half(half: CommonAttentionMetadata) -> None:
    """What the host says is consistent, and no bound is below the truth."""
    starts = half.query_start_loc_cpu
    assert half.query_start_loc.tolist() == starts.tolist() and starts[0] == 0
    assert starts[-1] == half.num_actual_tokens == len(half.slot_mapping) and len(starts) == half.num_reqs + 1
    assert half.max_query_len == np.diff(starts).max() > 0
    assert len(half.seq_lens_cpu_upper_bound) == half.num_reqs == len(half.block_table) == len(half.seq_lens)
    assert (half.seq_lens_cpu_upper_bound >= half.seq_lens.numpy()).all() and half.max_seq_len <= MAX_LEN
    lens, drafts = np.diff(starts)[: half.num_decodes], half.num_drafts_cpu
    assert drafts is not None and 0 <= half.num_decodes <= half.num_reqs
    assert (lens == lens[:1]).all() and (lens == 1 + drafts[: half.num_decodes]).all()
    assert (half.query_lens.numpy() <= np.diff(starts)).all() and (half.query_lens >= 0).all()


@pytest.mark.parametrize("seed", range(60))
def test_any_batch_at_any_token(seed: int) -> None:
    rng = random.Random(seed)
    common = draw_batch(rng, has_exact=seed % 3 == 0)
    copies = [x.clone() for x in (common.query_lens, common.seq_lens, common.query_start_loc)]
    bounds, expected = common.seq_lens_cpu_upper_bound.copy(), used_tokens(common)
    for at in range(1, common.num_actual_tokens):
        first, second = split_batch(common, at)
        assert first.tokens == slice(0, at) and second.tokens == slice(at, common.num_actual_tokens)
        found: dict[int, tuple[int, int]] = {}
        for half in (first, second):
            check_half(half.attention)
            own = used_tokens(half.attention)
            assert all(half.tokens.start <= slot < half.tokens.stop for slot in own)
            found |= own
            assert torch.equal(half.attention.block_table, common.block_table[half.requests])
        assert found == expected
        if common.num_computed_cpu is not None and first.requests.stop > second.requests.start:
            within = at - int(common.query_start_loc_cpu[second.requests.start])
            assert second.attention.num_computed_cpu is not None
            assert second.attention.num_computed_cpu[0] == common.num_computed_cpu[second.requests.start] + within
    # The batch itself serves the second half, the drafter and the next step.
    assert all(
        torch.equal(*pair)
        for pair in zip(copies, (common.query_lens, common.seq_lens, common.query_start_loc), strict=True)
    )
    assert np.array_equal(bounds, common.seq_lens_cpu_upper_bound)


def test_a_bound_that_is_cut_by_all_skipped_tokens_is_found() -> None:
    """Unused draft slots after the cut make the request no shorter before it: the fault that ``check_half`` catches."""
    failures = 0
    for seed in range(60):
        common = draw_batch(random.Random(seed))
        for at in range(1, common.num_actual_tokens):
            first, second = split_batch(common, at)
            if first.requests.stop == second.requests.start:
                continue
            skipped = int(common.query_start_loc_cpu[first.requests.stop]) - at
            bound = common.seq_lens_cpu_upper_bound[first.requests.stop - 1] - skipped
            failures += bool(bound < first.attention.seq_lens[-1])
    assert failures


def test_encoders_are_cut_between_texts_alone() -> None:
    common = draw_batch(random.Random(2))
    starts = common.query_start_loc_cpu.tolist()
    splitter = Splitter((EncoderSpec(),), 1)
    within = next(at for at in range(1, common.num_actual_tokens) if at not in starts)
    with pytest.raises(ValueError, match="cannot be cut within a request: every token of a text attends to all others"):
        split_batch(common, within, splitter.refusal)
    for at in range(1, common.num_actual_tokens):
        splitter.choose = lambda _, at=at: at
        if (halves := splitter.split(common)) is not None:
            assert halves[1].tokens.start in starts[1:-1]
    assert Splitter((GroupedQuerySpec(1, 4),), 1).refusal == ""


def test_small_steps_and_steps_planned_on_the_host_stay_whole() -> None:
    common = draw_batch(random.Random(2))
    splitter = Splitter((GroupedQuerySpec(1, 4),), common.num_actual_tokens + 1)
    assert splitter.split(common) is None
    splitter = Splitter((GroupedQuerySpec(1, 4),), common.num_actual_tokens)
    halves = splitter.split(common)
    assert halves is not None and halves[1].tokens.start == common.num_actual_tokens // 2
    assert splitter.split(draw_batch(random.Random(2), has_exact=True)) is None
    for at in (0, common.num_actual_tokens):
        with pytest.raises(ValueError, match="has no second half"):
            split_batch(common, at)


# --- outputs --------------------------------------------------------------------------------------


DRAFTS: dict[str, Any] = {"speculate": "ngram", "k": 3}
KINDS = [
    ("llama", {"attention_backend": "reference"}),
    ("llama", {"attention_backend": "cpu", **DRAFTS}),
    ("llama", {"attention_backend": "flex"}),
    ("llama", {"device": "sim", "attention_backend": "triton", "cudagraph_mode": "none", **DRAFTS}),
    ("gemma3", {"attention_backend": "cpu"}),
    ("qwen3-next", {}),
    ("qwen3-next", DRAFTS),
    ("deepseek-v2", DRAFTS),
    ("deepseek-v3.2", DRAFTS),
    ("bert", {}),
]


@pytest.fixture
def hiddens(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The hidden states of the tokens in use of every forward pass on a CPU; unused slots of drafts hold anything."""
    found: list[Tensor] = []
    target = StepProgram.target

    def kept(self: StepProgram, batch: InputBatch, taps: Any) -> Tensor:
        hidden, common = target(self, batch, taps), batch.attention
        if type(hidden) is Tensor:
            both = zip(common.query_start_loc.tolist(), common.query_lens.tolist(), strict=False)
            found.append(torch.cat([hidden[start : start + count] for start, count in both]))
        return hidden

    monkeypatch.setattr(StepProgram, "target", kept)
    yield found


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, options: dict[str, Any], seed: int | None) -> list[Any]:
    """All that an engine answers, its steps cut anywhere."""
    resolve = build.resolve
    with monkeypatch.context() as patch:
        if seed is not None:
            patch.setattr(build, "resolve", lambda *args: replace(resolve(*args), split_steps_from=2))
        engine = build.build_engine(
            EngineOptions(**{"model": str(folder), "dtype": "float64", "max_num_seqs": 4, **options})
        )
    if seed is not None:
        rng, splitter = random.Random(seed), engine.core.runner.splitter
        assert splitter is not None
        splitter.choose = lambda common: rng.randint(0, common.num_actual_tokens)
    return drive(engine.core, "bert" in engine.config.model.architecture.lower())


def drive(core: EngineCore, is_encoder: bool) -> list[Any]:
    from tests.engine.test_pooled import make_pooled

    generator = torch.Generator().manual_seed(2)
    # Long enough for prompts of latents and for chunks of states, and repeating themselves, so that drafts are right.
    prompts = [torch.randint(2, 250, (n,), generator=generator).tolist() * 2 for n in (20, 3, 7, 1, 32)]
    requests = [make_pooled(f"p{i}", tuple(ids), "mean") for i, ids in enumerate(prompts)]
    if not is_encoder:
        requests += [make_request(f"g{i}", tuple(ids), 8) for i, ids in enumerate(prompts)]
    for request in requests:
        core.add(request)
    found: dict[str, list[Any]] = {}
    while core.has_work:
        for update in core.step():
            assert update.error is None
            vector = None if update.vector is None else np.frombuffer(update.vector.data)
            found.setdefault(update.request_id, []).append((update.token_ids, vector))
    assert core.stats.num_sync_violations == 0
    return [found[request.request_id] for request in requests]


@pytest.mark.parametrize(("variant", "options"), KINDS, ids=str)
def test_the_same_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hiddens: list[Tensor], variant: str, options: dict[str, Any]
) -> None:
    if variant == "bert":
        folder = tiny_encoders.save(tiny_encoders.build("bert"), tmp_path)
    else:
        folder = tiny_models.save(tiny_models.build(variant), tmp_path)
    whole = run(monkeypatch, folder, options, None)
    whole_states = hiddens[:]
    for seed in range(2):
        hiddens.clear()
        split = run(monkeypatch, folder, options, seed)
        assert len(hiddens) == len(whole_states)
        for one, other in zip(hiddens, whole_states, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        for own, expected in zip(split, whole, strict=True):
            for (tokens, vector), (other_tokens, other_vector) in zip(own, expected, strict=True):
                assert tokens == other_tokens
                if other_vector is not None:
                    np.testing.assert_allclose(vector, other_vector, rtol=0, atol=1e-12)
