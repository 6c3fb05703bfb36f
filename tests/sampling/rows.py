"""Request rows as a step finds them, from a few Python values."""

from __future__ import annotations

import torch

from slipstream.config import EngineOptions, Hardware
from slipstream.device.cpu import CpuDevice
from slipstream.engine.resolve import resolve
from slipstream.plan import RowInit
from slipstream.request import Request
from slipstream.runner.request_state import RequestRows
from slipstream.sampling.operation import Positions, SamplingRows
from slipstream.sampling.sampler import SamplingNeeds
from slipstream.sampling_params import SamplingParams
from tests.test_config import MODEL


def make_rows(
    requests: list[Request], histories: list[list[int]], before: tuple[Request, list[int]] | None = None
) -> tuple[SamplingRows, Positions, SamplingNeeds]:
    """Rows that hold the requests in reverse order, what selects them in order, and what the batch needs.

    ``before``: a request, with its tokens, that has had all of these rows.
    """
    options = EngineOptions(max_num_seqs=len(requests), max_model_len=128, max_num_batched_tokens=512)
    rows = RequestRows(resolve(options, Hardware("cpu", 2**30, True), MODEL), CpuDevice())
    for row in range(len(requests) if before is not None else 0):
        assert before is not None
        rows.stage_init(RowInit(row, *before, 0))
        rows.flush()
    needs = SamplingNeeds()
    for i, (request, history) in enumerate(zip(requests, histories, strict=True)):
        rows.stage_init(RowInit(len(requests) - 1 - i, request, history, 0))
        rows.flush()
        needs |= SamplingNeeds.for_request(request)
    order = torch.arange(len(requests) - 1, -1, -1, dtype=torch.int32)
    return rows.sampling, Positions(order, rows.num_tokens[order]), needs


def make_request(prompt: list[int], bad_word_ids: tuple[tuple[int, ...], ...] = (), **params: object) -> Request:
    sampling = SamplingParams.from_dict({"temperature": 0.0, "seed": 1, **params}).with_defaults(SamplingParams())
    stops = tuple(params.get("stop_token_ids", ()))  # type: ignore[arg-type]
    return Request("r", tuple(prompt), sampling, stops, 128, bad_word_ids=bad_word_ids)
