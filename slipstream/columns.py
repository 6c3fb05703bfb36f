"""Columns of the request rows, as those declare them that read them: sampling operations, step heads, models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from slipstream.request import Request


class Column(NamedTuple):
    """One value or several per request row. The host stages them when a request is assigned to the row."""

    name: str
    # One number, or with a shape, a list or tuple of at most as many: entries after them keep values of the row's
    # previous request.
    value: Callable[[Request], Any]
    dtype: Literal["int32", "float32"] = "int32"
    shape: tuple[int, ...] = ()
