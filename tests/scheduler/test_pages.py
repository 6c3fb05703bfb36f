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
