"""The search of n-grams: its definition against a loop over everything, its kernel against its definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels import triton_jit
from slipstream.speculate.ngram_match import copied, latest_longest_match
from slipstream.speculate.ngram_search import find_continuation
from tests.kernels.triton_check import Case, check_kernel, poisoned_allocations, quietly_interpreted
from tests.operation_checks import checked_operations
from tests.speculate.triton_cases_ngram import CASES

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
JUNK = 4
WITHOUT_A_MATCH = {"ngram-no-rows", "ngram-1-vocab1-match1to1-k1", "ngram-5000-vocab1000000-match1to3-k2"}


@pytest.fixture(autouse=True)
def _operations_keep_their_word() -> Iterator[None]:
    with checked_operations(compare_inputs=True):
        yield


def oracle(tokens: list[int], allowed: int, min_match: int, max_match: int, k: int) -> list[int]:
    """Every length from the longest, every position from the latest; the copy token by token."""
    none = [-1] * k
    length = len(tokens)
    for m in range(max_match, min_match - 1, -1):
        for end in range(length - 2, m - 2, -1):
            if tokens[end - m + 1 : end + 1] == tokens[length - m :]:
                longer = list(tokens)
                for j in range(k):
                    longer.append(longer[end + 1 + j])
                count = max(0, min(allowed, k))
                return longer[length : length + count] + none[count:]
    return none


def arguments(
    rows: list[list[int]], allowed: list[int], batch: list[int], min_match: int, max_match: int, k: int
) -> dict[str, Any]:
    """After each row come values that would match best if they counted: its last tokens again."""
    max_len = max(map(len, rows), default=0) + 2 * JUNK
    table = [(row + (row[-JUNK:] or [7]) * max_len)[:max_len] for row in rows]
    return {
        "batch_rows": torch.tensor(batch, dtype=torch.int32),
        "token_ids": torch.tensor(table, dtype=torch.int32),
        "num_tokens": torch.tensor([len(row) for row in rows], dtype=torch.int32),
        "max_drafts": torch.tensor(allowed, dtype=torch.int32),
        "min_match": min_match,
        "max_match": max_match,
        "k": k,
    }


def searched(args: dict[str, Any]) -> list[list[int]]:
    drafts: list[list[int]] = find_continuation(*args.values()).tolist()
    return drafts


def found(tokens: list[int], min_match: int, max_match: int, k: int, allowed: int = 16) -> list[int]:
    """The definition's answer for one row beside a scratch row, whose answer is nothing."""
    args = arguments([tokens, []], [allowed, allowed], [0, 1], min_match, max_match, k)
    own, scratch = searched(args)
    assert scratch == [-1] * k
    assert own == oracle(tokens, allowed, min_match, max_match, k)
    if triton_jit.is_available():
        with quietly_interpreted(), poisoned_allocations():
            assert searched(args) == [own, scratch]
    return own


@pytest.mark.parametrize("max_match", [2, 3, 32])
def test_no_match(max_match: int) -> None:
    assert found([1, 2, 3, 4, 5], 1, max_match, 3) == [-1, -1, -1]
    assert found([4, 5, 1, 5], 2, max_match, 3) == [-1, -1, -1]


def test_a_match_of_exactly_the_least_length() -> None:
    tokens = [9, 1, 2, 6, 7, 8, 1, 2]
    assert found(tokens, 2, 5, 3) == [6, 7, 8]
    assert found(tokens, 3, 5, 3) == [-1, -1, -1]


@pytest.mark.parametrize("max_match", [2, 3, 9])
def test_of_equal_matches_the_latest_counts(max_match: int) -> None:
    assert found([1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2], 1, max_match, 2) == [7, 1]


def test_a_longer_match_counts_before_a_later_one() -> None:
    tokens = [3, 1, 2, 5, 8, 1, 2, 6, 3, 1, 2]
    assert found(tokens, 1, 3, 2) == [5, 8]
    assert found(tokens, 1, 2, 2) == [6, 3]  # both count as two


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.integers(0, 1), min_size=40, max_size=160), min_match=st.integers(1, 4), more=st.integers(0, 12)
)
def test_of_many_matches_the_longest_counts(text: list[int], min_match: int, more: int) -> None:
    """More than are looked at one by one."""
    end = latest_longest_match(np.array(text, dtype=np.int32), min_match, min_match + more)
    expected = oracle(text, 4, min_match, min_match + more, 4)
    assert expected == ([-1] * 4 if end is None else copied(np.array(text, dtype=np.int32), end, 4))


def test_a_match_may_begin_with_the_row_but_not_before_it() -> None:
    assert found([1, 2, 3, 1, 2], 2, 5, 2) == [3, 1]
    assert found([2, 3, 1, 2], 2, 5, 2) == [-1, -1]
    # A window that wrapped around would match here.
    assert found([2, 9, 1, 2], 2, 2, 2) == [-1, -1]


def test_a_copy_goes_on_with_what_it_copied() -> None:
    assert found([5, 8, 8, 8], 1, 2, 6) == [8] * 6
    assert found([5, 1, 2, 3, 1, 2, 3], 1, 3, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert found([4, 4], 1, 32, 16) == [4] * 16


@pytest.mark.parametrize("length", range(5))
def test_a_row_too_short_for_the_least_match(length: int) -> None:
    assert found([6] * length, 4, 5, 2) == [-1, -1]
    assert found([6] * length, max(1, length), 5, 2) == [-1, -1]


def test_a_row_gets_no_more_drafts_than_it_may_have() -> None:
    tokens = [1, 2, 3, 4, 1]
    drafts = [2, 3, 4, 1]
    for allowed in range(-1, 6):
        given_ids = drafts[: max(0, allowed)]
        assert found(tokens, 1, 2, 4, allowed) == given_ids + [-1] * (4 - len(given_ids))


def test_impossible_sizes_are_refused() -> None:
    for sizes in ((0, 3, 2), (4, 3, 2), (1, 33, 2), (1, 3, 0), (1, 3, 17)):
        with pytest.raises(ValueError, match="are possible"):
            searched(arguments([[1, 1]], [1], [0], *sizes))


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    vocab_size = draw(st.integers(1, 3))
    rows = draw(st.lists(st.lists(st.integers(0, vocab_size - 1), max_size=24), min_size=1, max_size=4))
    allowed = draw(st.lists(st.integers(0, 7), min_size=len(rows), max_size=len(rows)))
    batch = draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
    min_match = draw(st.integers(1, 6))
    max_match = draw(st.integers(min_match, 9))
    return arguments(rows, allowed, batch, min_match, max_match, draw(st.integers(1, 7)))


@settings(max_examples=400, deadline=None)
@given(args=searches())
def test_equals_a_search_of_everything(args: dict[str, Any]) -> None:
    expected = []
    for row in args["batch_rows"].tolist():
        tokens = args["token_ids"][row, : args["num_tokens"][row]].tolist()
        allowed = int(args["max_drafts"][row])
        expected.append(oracle(tokens, allowed, args["min_match"], args["max_match"], args["k"]))
    assert searched(args) == expected


@needs_triton
@settings(max_examples=60, deadline=None)
@given(args=searches())
def test_kernel_is_its_definition_on_short_rows(args: dict[str, Any]) -> None:
    check_kernel(find_continuation, args)


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_is_its_definition(case: Case) -> None:
    torch.manual_seed(0)
    check_kernel(case.op, case.args(), scale=case.scale)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_find_something(case: Case) -> None:
    """Where nothing is to be found, a kernel that never looks would pass for its definition."""
    torch.manual_seed(0)
    drafts = [token for row in searched(case.args()) for token in row]
    assert max(drafts, default=-1) >= 0 or case.name in WITHOUT_A_MATCH


@needs_triton
def test_counts_are_zero_after_a_launch() -> None:
    with quietly_interpreted():
        searched(arguments([[1, 2, 1], []], [3, 3], [0, 1], 1, 2, 3))
    assert not triton_jit.arrival_counts(torch.device("cpu"), 2).any()
