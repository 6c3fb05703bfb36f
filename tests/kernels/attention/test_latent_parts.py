"""Parts by walking from key to key; who computes which by going through them all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from slipstream.kernels import triton_jit
from slipstream.kernels.attention import latent_parts
from slipstream.kernels.attention.latent_parts import (
    PartTable,
    count_parts,
    first_key_of,
    first_of_part,
    parts_of,
    schedule_parts,
)
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.triton_jit import jit, tl
from tests.kernels.triton_cases_latent import ints
from tests.kernels.triton_check import poisoned, quietly_interpreted

Schedule = Callable[[PagedRequests, int, PartTable], None]


def interpreted_schedule(requests: PagedRequests, most: int, table: PartTable) -> None:
    with quietly_interpreted():
        schedule_parts.body(requests, most, table)


needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
SCHEDULES = [
    pytest.param(schedule_parts, id="definition"),
    pytest.param(interpreted_schedule, id="kernel", marks=needs_triton),
]


def walked(end: int) -> list[tuple[int, int]]:
    """First key and size of all parts up to there."""
    found, first = [], 0
    while first < end:
        size = next(size for size, below in SIZES if first < below)
        found.append((first, size))
        first += size
    return found


SIZES = [(128, 1024), (256, 4096), (512, 16_384), (1024, 65_536), (2048, 1 << 40)]


def test_parts_lie_where_walking_finds_them() -> None:
    parts = walked(300_000)
    assert sum(size for _, size in parts) == parts[-1][0] + parts[-1][1]
    assert count_parts(0) == 0
    for idx, (first, size) in enumerate(parts):
        assert first_of_part(idx) == first
        assert [count_parts(first + n) for n in (0, 1, size - 1, size)] == [idx, idx + 1, idx + 1, idx + 1]


@jit
def _parts_kernel(lengths, counts, firsts, LADDER: tl.constexpr):  # noqa: N803
    i = tl.arange(0, 128)
    length = tl.load(lengths + i)
    tl.store(counts + i, parts_of(length, LADDER))
    tl.store(firsts + i, first_key_of(parts_of(length, LADDER), LADDER))


@needs_triton
def test_the_kernels_cut_alike() -> None:
    edges = [first + more for first, _ in walked(300_000) for more in (-1, 0, 1)][1:]
    lengths = ints([0, *edges[:: len(edges) // 120]])[:128]
    lengths = torch.cat([lengths, lengths[-1:].repeat(128 - len(lengths))])
    counts, firsts = poisoned(128), poisoned(128)
    with quietly_interpreted():
        _parts_kernel[(1,)](lengths, counts, firsts, LADDER=latent_parts.LADDER)
    assert counts.tolist() == [count_parts(n) for n in lengths.tolist()]
    assert firsts.tolist() == [first_of_part(count_parts(n)) for n in lengths.tolist()]


def batch(slots: list[int], query_lens: list[int], seq_lens: list[int]) -> PagedRequests:
    starts = ints([0, *slots]).cumsum(0).int()
    return PagedRequests(starts, ints(query_lens), ints(seq_lens), torch.zeros(len(slots), 1, dtype=torch.int32))


def cut_table(table: Tensor, num_reqs: int) -> list[list[int]]:
    """(request, part), ascending, as part_starts has them."""
    return [[i, part] for i in range(num_reqs) for part in range(int(table[i + 1] - table[i]))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_requests_with_few_slots_and_something_to_do_have_parts(schedule: Schedule) -> None:
    requests = batch([4, 5, 4, 4, 1, 0], [4, 1, 0, 1, 1, 0], [300, 300, 300, 0, 5000, 0])
    table = PartTable(poisoned(12), poisoned(6, 2))
    schedule(requests, 4, table)
    many = len(walked(5000))
    assert table.part_starts.tolist() == [0, 3, 3, 3, 3, *[3 + many] * 7]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_programs", [1, 5, 40])
@pytest.mark.parametrize("seed", range(3))
def test_programs_share_all_parts_equally(schedule: Schedule, num_programs: int, seed: int) -> None:
    torch.manual_seed(seed)
    num_reqs, longest = [(3, 12), (9, 20_000), (30, 20_000)][seed]  # fewer keys than programs, too
    slots = torch.randint(0, 20, (num_reqs,)).tolist()
    lens = (longest * torch.rand(num_reqs) ** 4).int().tolist()
    table = PartTable(poisoned(num_reqs + 1), poisoned(num_programs + 1, 2))
    schedule(batch(slots, [min(n, 1) for n in slots], lens), 17, table)

    parts = cut_table(table.part_starts, num_reqs)
    taking = [0 < n <= 17 for n in slots]
    expected = [[i, k] for i, n in enumerate(lens) if taking[i] for k in range(len(walked(n)))]
    assert parts == expected
    begins = table.begins.tolist()
    runs = [[part for part in parts if a <= part < b] for a, b in pairwise(begins)]
    assert [part for run in runs for part in run] == parts, "each part once, in order"
    sizes = [size for _, size in walked(20_000)]
    loads = [sum(min(sizes[k], lens[i] - first_of_part(k)) for i, k in run) for run in runs]
    # A run ends with the part that reaches the share, so it is at most one part longer.
    largest = max((sizes[k] for _, k in parts), default=0)
    assert max(loads) <= -(-sum(loads) // num_programs) + largest


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_to_do(schedule: Schedule) -> None:
    table = PartTable(poisoned(4), poisoned(9, 2))
    schedule(batch([0, 30], [0, 30], [0, 99]), 17, table)
    assert not table.part_starts.any() and not table.begins.any()
