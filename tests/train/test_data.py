from __future__ import annotations

from slipstream.train.data import _held_out


def test_nothing_that_is_asked_twice_is_held_out() -> None:
    turns = [f"turn {i}" for i in range(64)]
    held = _held_out(turns)
    assert [i for i, flag in enumerate(held) if flag] == [8, 24, 40, 56]
    turns[60] = turns[24]
    assert [i for i, flag in enumerate(_held_out(turns)) if flag] == [8, 40, 56]
    assert sum(_held_out([str(i) for i in range(40_000)])) == 96
