from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.train.vocabulary import choose_vocabulary, coverage


@given(st.lists(st.integers(0, 29), max_size=200), st.integers(1, 40), st.integers(0, 29))
def test_maps_agree_and_the_frequent_are_kept(tokens: list[int], size: int, end: int) -> None:
    chosen = choose_vocabulary(torch.tensor(tokens, dtype=torch.int32), 30, size, always=(end, 99))
    ids = (torch.arange(min(size, 30)) + chosen.d2t).tolist()
    assert ids == sorted(set(ids)) == chosen.target_ids.tolist()
    assert chosen.t2d.nonzero().flatten().tolist() == ids
    assert end in ids
    left_out = set(range(30)) - set(ids)
    least = min(tokens.count(i) for i in ids if i != end or size == 1)
    assert all(tokens.count(i) <= least for i in left_out) or size == 1


def test_of_equally_frequent_ones_the_lower_ids() -> None:
    chosen = choose_vocabulary(torch.tensor([7, 7, 5], dtype=torch.int32), 10, 4)
    assert chosen.target_ids.tolist() == [0, 1, 5, 7]
    assert coverage(chosen, torch.tensor([7, 7, 9, 0])) == 0.75
