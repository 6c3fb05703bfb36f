"""Rows of every length over tiny vocabularies for the search of n-grams; run interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.speculate.ngram_search import LONGEST_MATCH, MOST_DRAFTS, find_continuation
from tests.kernels.triton_check import POISON, Case

# Around one block of positions, and around one block for each of the programs that share a row.
BORDERS = (1023, 1024, 1025, 1026, 8191, 8192, 8193, 8194)


def search_args(
    tokens: Tensor,  # [num_rows, max_len]; the last row becomes the scratch row
    lengths: list[int],  # of all rows but the last
    min_match: int,
    max_match: int,
    k: int,
) -> dict[str, Any]:
    num_rows, max_len = tokens.shape
    num_tokens = torch.tensor([*lengths, 0], dtype=torch.int32)
    # After a row come first values that would match as well, then memory that must not be read.
    tokens[torch.arange(max_len) >= num_tokens.unsqueeze(1) + max_len // 8] = POISON << 16
    max_drafts = torch.full((num_rows,), k, dtype=torch.int32)
    max_drafts[::3] = torch.randint(0, k + 3, max_drafts[::3].shape, dtype=torch.int32)
    scratch = num_rows - 1
    batch_rows = torch.cat([torch.randperm(scratch), torch.full((2,), scratch)])
    return {
        "batch_rows": batch_rows.int(),
        "token_ids": tokens.int(),
        "num_tokens": num_tokens,
        "max_drafts": max_drafts,
        "min_match": min_match,
        "max_match": max_match,
        "k": k,
    }


def _random_rows() -> Iterator[Case]:
    shapes = (  # longest row, vocabulary, min_match, max_match, k
        (1, 1, 1, 1, 1),
        (2, 1, 1, 2, 3),
        (7, 2, 1, 5, 4),
        (40, 3, 2, 3, 1),
        (333, 2, 3, 5, 5),
        (1500, 4, 1, 1, 7),
        (5000, 3, 2, 5, 8),
        (5000, 1, 1, LONGEST_MATCH, MOST_DRAFTS),
        (5000, 2, 9, LONGEST_MATCH, MOST_DRAFTS),
        (5000, 50, 1, 4, 3),
        (5000, 1000, 1, 1, 2),
        (5000, 10**6, 1, 3, 2),
        (20_000, 4000, 1, 2, 3),  # a program has several blocks
    )
    for longest, vocab_size, min_match, max_match, k in shapes:

        def args(
            longest: int = longest, v: int = vocab_size, sizes: tuple[int, ...] = (min_match, max_match, k)
        ) -> Any:
            lengths = [longest, *torch.randint(1, longest + 1, (4,)).tolist(), min(longest, sizes[0])]
            return search_args(torch.randint(0, v, (len(lengths) + 1, longest + 9)), lengths, *sizes)

        yield Case(f"ngram-{longest}-vocab{vocab_size}-match{min_match}to{max_match}-k{k}", find_continuation, args)


def _borders() -> Iterator[Case]:
    """The suffix occurs once more in the row, so that it ends at a border of blocks, or begins there."""
    for length in BORDERS:

        def args(length: int = length) -> dict[str, Any]:
            num_rows, suffix = 6, 4
            tokens = torch.arange(length + 9).repeat(num_rows + 1, 1)
            for row, end in enumerate((suffix - 1, 1022, 1023, 1024, 1026, length - 2)):
                # One after the other, for the two may overlap.
                for to in range(length - suffix, length):
                    tokens[row, to] = tokens[row, to - (length - 1 - min(end, length - 2))]
            return search_args(tokens, [length] * num_rows, 2, 5, 6)

        yield Case(f"ngram-border-{length}", find_continuation, args)


def _views() -> Iterator[Case]:
    def no_rows() -> dict[str, Any]:
        return {**search_args(torch.ones(3, 20), [5, 9], 1, 3, 4), "batch_rows": torch.empty(0, dtype=torch.int32)}

    def strided() -> dict[str, Any]:
        drawn = search_args(torch.randint(0, 2, (4, 200)), [10, 99, 100], 2, 5, 4)
        return {**drawn, "token_ids": drawn["token_ids"].repeat(1, 2)[:, :200]}

    def same_row_twice() -> dict[str, Any]:
        drawn = search_args(torch.randint(0, 2, (3, 200)), [50, 150], 2, 5, 4)
        return {**drawn, "batch_rows": torch.tensor([1, 1, 0, 2, 1, 2], dtype=torch.int32)}

    def another_row_before() -> dict[str, Any]:
        # With the 3 at the end of the row before, the first 1, 2 would be the longer match.
        tokens = torch.tensor([1, 2, 5, 1, 2, 6, 3, 1, 2, 3]).repeat(3, 1)
        drawn = search_args(tokens, [9, 9], 1, 4, 2)
        drawn["token_ids"][:, -1] = 3
        return {**drawn, "max_drafts": torch.full((3,), 2, dtype=torch.int32)}

    def longest_context() -> dict[str, Any]:
        length = 131_072
        tokens = torch.randint(0, 10**6, (3, length))
        for row, at in enumerate((77, 70_001)):
            tokens[row, -3:] = tokens[row, at : at + 3]
        return {**search_args(tokens, [length] * 2, 2, 4, 5), "max_drafts": torch.full((3,), 5, dtype=torch.int32)}

    yield Case("ngram-no-rows", find_continuation, no_rows)
    yield Case("ngram-rows-of-a-wider-table", find_continuation, strided)
    yield Case("ngram-same-row-twice", find_continuation, same_row_twice)
    yield Case("ngram-another-row-before", find_continuation, another_row_before)
    yield Case("ngram-longest-context", find_continuation, longest_context)


CASES = [*_random_rows(), *_borders(), *_views()]
