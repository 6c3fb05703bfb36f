"""Vectors of texts in any chunks beside other requests, against means and rows of the whole text in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.step.pool import PooledRequests, pool
from slipstream.pooling import PoolingKind

SIZE = 5


def run_in_chunks(texts: list[Tensor], kinds: list[int], chunks: list[list[int]], kept: Tensor) -> list[Tensor]:
    """Steps in which each text goes on by its next chunk; a text that has ended stays in the batch as a row at rest."""
    num_rows, lengths = len(texts), torch.tensor([len(text) for text in texts], dtype=torch.int32)
    rows, done = torch.randperm(num_rows).to(torch.int32), [0] * num_rows
    vectors: list[Tensor] = [torch.empty(0)] * num_rows
    for step in range(max(map(len, chunks))):
        counts = [chunks[row][step] if step < len(chunks[row]) else 0 for row in rows.tolist()]
        planned = [max(1, count) for count in counts]  # a row at rest has unused places
        starts = torch.tensor([0, *planned], dtype=torch.int32).cumsum(0).to(torch.int32)
        hidden = torch.full((int(starts[-1]) + 2, SIZE), torch.nan, dtype=texts[0].dtype)
        positions = torch.full((hidden.shape[0],), 1 << 40)
        for place, (row, count) in enumerate(zip(rows.tolist(), counts, strict=True)):
            begin = int(starts[place])
            hidden[begin : begin + count] = texts[row][done[row] : done[row] + count]
            positions[begin : begin + count] = torch.arange(done[row], done[row] + count)
            done[row] += count
        out = torch.full((num_rows, SIZE), torch.nan, dtype=kept.dtype)
        query_lens = torch.tensor(counts, dtype=torch.int32)
        requests = PooledRequests(positions, rows, starts, query_lens)
        pool(hidden, requests, torch.tensor(kinds, dtype=torch.int32), lengths, kept, out)
        for place, (row, count) in enumerate(zip(rows.tolist(), counts, strict=True)):
            if count and done[row] == len(texts[row]) and kinds[row]:
                vectors[row] = out[place].clone()
            else:
                assert not out[place].any(), "a vector where no prompt ends"
    return vectors


def cut(length: int) -> list[int]:
    chunks = []
    while length:
        chunks.append(int(torch.randint(1, length + 1, ())))
        length -= chunks[-1]
    return chunks


@pytest.mark.parametrize("seed", range(20))
def test_vectors_do_not_depend_on_chunks(seed: int) -> None:
    torch.manual_seed(seed)
    lengths = torch.randint(1, 40, (9,)).tolist()
    texts = [torch.randn(length, SIZE, dtype=torch.float64) for length in lengths]
    kinds = [0, *PoolingKind, *torch.randint(0, 7, (2,)).tolist()]
    # What an earlier request of a row has left must not be read.
    kept = torch.full((len(texts), SIZE), torch.nan, dtype=torch.float64)
    vectors = run_in_chunks(texts, kinds, [cut(length) for length in lengths], kept)
    for text, kind, vector in zip(texts, kinds, vectors, strict=True):
        if kind:
            numbers = torch.arange(1, len(text) + 1, dtype=torch.float64)
            expected = {
                PoolingKind.LAST: text[-1],
                PoolingKind.CLS: text[0],
                PoolingKind.MEAN: text.mean(0),
                PoolingKind.MAX: text.max(0).values,
                PoolingKind.MEAN_SQRT_LEN: text.sum(0) / len(text) ** 0.5,
                PoolingKind.WEIGHTED_MEAN: (numbers @ text) / numbers.sum(),
            }
            torch.testing.assert_close(vector, expected[PoolingKind(kind)], rtol=1e-12, atol=1e-12)


def test_sums_of_half_precision_are_made_in_float32() -> None:
    texts = [(1000 + torch.rand(300, SIZE)).half()]
    kept = torch.full((1, SIZE), torch.nan, dtype=torch.float32)
    (vector,) = run_in_chunks(texts, [PoolingKind.MEAN], [[100, 150, 50]], kept)
    assert vector.dtype == torch.float32
    torch.testing.assert_close(vector.double(), texts[0].double().mean(0), rtol=1e-6, atol=0)
