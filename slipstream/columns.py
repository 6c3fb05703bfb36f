"""Columns of the request rows, as those declare them that read them: sampling operations, step heads, models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from slipstream.types import Request


class Column(NamedTuple):
    """A number, or several, of every request row. The host stages them when a request moves into the row."""

    name: str
    # One number, or where there is a shape, a list or tuple of at most as many: places after them keep what an earlier
    # request of the row had there.
    value: Callable[[Request], Any]
    dtype: Literal["int32", "float32"] = "int32"
    shape: tuple[int, ...] = ()
