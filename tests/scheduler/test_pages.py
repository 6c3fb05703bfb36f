from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.scheduler.pages import NULL_PAGE, PagePool


@given(st.lists(st.integers(0, 6), max_size=40))
def test_no_page_is_given_twice_and_none_is_lost(counts: list[int]) -> None:
    pool, held = PagePool(20, 16), []
    for i, count in enumerate(counts):
        if count > pool.num_free:
            with pytest.raises(RuntimeError):
                pool.take(count)
            continue
        held.append(pool.take(count))
        owned = [page for pages in held for page in pages]
        assert len(set(owned)) == len(owned) and NULL_PAGE not in owned
        assert len(owned) + pool.num_free == pool.num_usable == 19
        if i % 3 == 2:
            pool.give_back(held.pop(0))
    for pages in held:
        pool.give_back(pages)
    assert pool.num_free == pool.num_usable


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PagePool(3, 16).pages_for(tokens) == pages


@pytest.mark.parametrize(
    ("first_drafted", "second_drafted", "found"),
    [(True, True, 0), (True, False, 0), (False, False, 0), (False, True, 1)],
)
@pytest.mark.parametrize("is_first_held", [False, True])
def test_of_two_pages_with_the_same_content_one_is_found(
    first_drafted: bool, second_drafted: bool, found: int, is_first_held: bool
) -> None:
    """The first, unless the second alone holds the drafter's keys. The other is a page like any when it is free."""
    pool = PagePool(4, 16)
    pages = [pool.take(1)[0] for _ in range(2)]
    pool.remember(pages[0], b"same", first_drafted)
    if not is_first_held:
        pool.give_back(pages[:1])
    pool.remember(pages[1], b"same", second_drafted)
    assert pool.find([b"same"]) == [pages[found]]
    assert pool.are_drafted([pages[found]]) is (first_drafted or second_drafted)
    pool.give_back(pages if is_first_held else pages[1:])
    pool.check([])
    # Of three free pages the one that is cached is taken last.
    assert sorted(pool.take(2)) == sorted({1, 2, 3} - {pages[found]})
    assert pool.find([b"same"]) == [pages[found]]
