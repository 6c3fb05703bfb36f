from __future__ import annotations

import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.kernels.request_rows import find_request, gap_before, used_rows
from slipstream.kernels.triton_jit import jit, tl
from tests.kernels.triton_cases_delta import Batch
from tests.kernels.triton_check import quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
BATCH = Batch([3, 0, 70, 1], [0, 4, 2, 9], gaps=(2, 4, 0, 1), ahead=5, spare=3, padding=2)


def test_living_rows() -> None:
    rows, request, number = used_rows(torch.tensor([1, 5, 5], dtype=torch.int32), torch.tensor([2, 0, 3]))
    assert rows.tolist() == [1, 2, 5, 6, 7]
    assert request.tolist() == [0, 0, 2, 2, 2]
    assert number.tolist() == [0, 1, 0, 1, 2]


@jit
def _gap_kernel(requests, out, num_reqs, num_tokens):
    request = tl.program_id(0)
    begin, end = gap_before(requests, request, num_reqs, num_tokens)
    tl.store(out + 2 * request, begin)
    tl.store(out + 2 * request + 1, end)


@needs_triton
def test_gaps_and_living_rows_are_all_rows() -> None:
    requests = BATCH.requests()
    num_reqs = len(requests["counts"])
    out = torch.zeros(num_reqs + 1, 2, dtype=torch.int32)
    described = tuple(requests[name] for name in ("slots", "starts", "counts", "positions"))
    with quietly_interpreted():
        _gap_kernel[(num_reqs + 1,)](described, out, num_reqs, BATCH.num_tokens)
    empty = [row for begin, end in out.tolist() for row in range(begin, end)]
    living = used_rows(requests["starts"], requests["counts"])[0].tolist()
    assert sorted(empty + living) == list(range(BATCH.num_tokens))


@jit
def _find_kernel(starts, out, num_reqs, tile_rows: tl.constexpr):
    tile = tl.program_id(0)
    tl.store(out + tile, find_request(starts, num_reqs, tile, tile_rows))


@needs_triton
@pytest.mark.parametrize("tile_rows", [1, 4, 64])
def test_every_token_has_a_tile_of_its_request(tile_rows: int) -> None:
    requests = BATCH.requests()
    num_reqs = len(requests["counts"])
    num_tiles = BATCH.num_tokens // tile_rows + num_reqs
    found = torch.full((num_tiles,), -9, dtype=torch.int32)
    with quietly_interpreted():
        _find_kernel[(num_tiles,)](requests["starts"], found, num_reqs, tile_rows=tile_rows)
    for request, (start, count) in enumerate(
        zip(requests["starts"].tolist(), requests["counts"].tolist(), strict=True)
    ):
        first = start // tile_rows + request
        needed = -(-count // tile_rows)
        assert found[first : first + needed].tolist() == [request] * needed
    assert found.min() >= -1
