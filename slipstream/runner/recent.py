"""What was made for the last few of something, for they come again: draft lengths go back and forth."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_NUM_KEPT = 8


class Recent(Generic[K, V]):
    """By identity, the latest ones. An object is kept as long as what was made for it, so that none takes its place."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[K, V]] = {}

    def get(self, key: K) -> V | None:
        found = self._kept.get(id(key))
        return None if found is None else found[1]

    def put(self, key: K, value: V) -> V:
        if len(self._kept) >= _NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[id(key)] = (key, value)
        return value

    def clear(self) -> None:
        self._kept.clear()
