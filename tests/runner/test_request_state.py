from __future__ import annotations

import numpy as np
import torch

from slipstream.config import EngineConfig, EngineOptions, Hardware
from slipstream.device.cpu import CpuDevice
from slipstream.engine.resolve import resolve
from slipstream.plan import PageDiff, RowInit, RowStatus
from slipstream.request import MAX_DEVICE_STOP_IDS, Request
from slipstream.runner.request_state import RequestRows
from slipstream.sampling_params import SamplingParams
from tests.test_config import MODEL


def config() -> EngineConfig:
    options = EngineOptions(max_num_seqs=3, max_model_len=40, block_size=4, max_num_batched_tokens=8)
    return resolve(options, Hardware("cpu", 2**30, True), MODEL)


def test_a_request_moves_in_and_no_other_row_changes() -> None:
    rows = RequestRows(config(), CpuDevice())
    before = rows.store.clone()
    seed = 2**63 + 12345
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.25,
        min_p=0.5,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        logit_bias={7: 1.5, 9: -100.0},
        min_tokens=4,
        seed=seed,
    )
    request = Request("r", (11, 12), params, (3, 4), 30, choice=2, bad_word_ids=((1, 2), (3,)))
    rows.stage_init(RowInit(1, request, [11, 12, 13], 1))
    rows.stage_pages([PageDiff(1, 2, [8, 9])])
    rows.flush()
    assert rows.token_ids[1, :3].tolist() == [11, 12, 13]
    assert rows.num_tokens.tolist() == [0, 3, 0, 0] and rows.max_total[1] == 30 and rows.num_computed[1] == 1
    sampling = rows.sampling
    assert (sampling.prompt_len[1], sampling["min_total"][1], sampling.choice[1], sampling["top_k"][1]) == (2, 6, 2, 5)
    names = ("min_p", "repetition", "frequency", "presence")
    assert [sampling[name][1].item() for name in names] == [0.5, 1.5, -0.5, 0.25]
    assert sampling["num_bias"][1] == 2 and sampling["bias_ids"][1, :2].tolist() == [7, 9]
    assert sampling["bias_values"][1, :2].tolist() == [1.5, -100.0]
    assert sampling["num_bad_words"][1] == 2
    assert sampling["bad_words"][1, :2].tolist() == [[-1] * 6 + [1, 2], [-1] * 7 + [3]]
    assert rows.status.tolist() == [RowStatus.INERT, RowStatus.RUNNING, RowStatus.INERT, RowStatus.INERT]
    assert rows.sampling.temperature[1] == torch.tensor(0.7) and rows.sampling["top_p"][1] == 0.25
    assert rows.sampling.seeds[1].numpy().view(np.uint64)[0] == seed
    assert rows.stop_ids[1].tolist() == [3, 4] + [-1] * (MAX_DEVICE_STOP_IDS - 2)
    assert rows.page_table[1].tolist() == [0, 0, 8, 9] + [0] * 6
    for other in (0, 2, rows.scratch_row):
        assert not rows.token_ids[other].any() and not rows.page_table[other].any()
    assert (rows.store != before).sum() > 0


def test_an_unchanged_batch_stages_nothing() -> None:
    rows = RequestRows(config(), CpuDevice())
    batch, starts = np.array([2, 0], dtype=np.int32), np.array([0, 1, 4], dtype=np.int32)
    rows.stage_batch(rows.batch_columns(batch, starts, starts * 2, starts * 3))
    assert rows.flush() > 0
    # Law 6: everything after the batch is padding.
    assert rows.batch_rows.tolist() == [2, 0, rows.scratch_row]
    assert rows.query_start_loc.tolist() == [0, 1, 4, 4]
    assert rows.logit_start_loc.tolist() == [0, 2, 8, 8]
    assert rows.draft_start_loc.tolist() == [0, 3, 12, 12]
    rows.stage_batch(rows.batch_columns(batch, starts, starts * 2, starts * 3))
    assert rows.flush() == 0
    rows.stage_batch(rows.batch_columns(np.array([1], dtype=np.int32), *[np.array([0, 1], dtype=np.int32)] * 3))
    rows.flush()
    assert rows.batch_rows.tolist() == [1, rows.scratch_row, rows.scratch_row]
    assert rows.query_start_loc.tolist() == [0, 1, 1, 1]


def test_the_worst_step_fits_into_the_staging_buffers() -> None:
    rows = RequestRows(config(), CpuDevice())
    bias = dict.fromkeys(range(300), 1.0)
    params = SamplingParams(temperature=0.0, seed=0, logit_bias=bias).with_defaults(SamplingParams())
    bad_words = tuple((i,) * 8 for i in range(32))
    for row in range(3):
        request = Request("r", (1,) * 13, params, tuple(range(16)), 40, bad_word_ids=bad_words)
        rows.stage_init(RowInit(row, request, [1] * 13, 0))
        rows.stage_pages([PageDiff(row, 0, list(range(1, 11)))])
    starts = np.array([0, 2, 4, 8], dtype=np.int32)
    rows.stage_batch(rows.batch_columns(np.array([0, 1, 2], dtype=np.int32), *[starts] * 3))
    rows.flush()
