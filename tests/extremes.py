"""What a caller may send by mistake or on purpose: values at and beyond the ends of every field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from slipstream.sampling_params import SamplingParams

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**31) - 1, -(2**63) - 1, 10**400),
    *(0.5, -0.0, 1e308, 5e-324, math.nan, math.inf, -math.inf, True, False, None),
)
TEXTS: tuple[Any, ...] = ("", "x", "\x00", "\ud800", "x" * 2000, "\N{REPLACEMENT CHARACTER}")
LISTS: tuple[Any, ...] = (
    *([], [[]], [None], [True, 5], [1.5], [-1], [2**31], [2**63], [2**64], ["\ud800"], [""], ["x"]),
    *(list(range(300)), [1] * 100_000, ["x"] * 10_000, ["x" * 5000]),
)
MAPPINGS: tuple[Any, ...] = (
    *({}, {"1": 1}, {"-1": 1}, {"x": 1}, {"1": math.nan}, {"1": math.inf}, {"1": True}, {"99999999999999999999": 1}),
    *({"1": 10**400}, dict.fromkeys(map(str, range(5000)), 1.0)),
)
# Only a caller in the same language can send these.
OBJECTS: tuple[Any, ...] = (
    *(np.float32(0.5), np.int64(3), np.array([1, 2]), b"x", object(), 1j, range(3), {1.5: 1.0}, {True: 1.0}, {None: 1}),
    *(np.float64(0.5), frozenset([1]), (1, 2), ("x",)),
)
JSON = st.sampled_from((*NUMBERS, *TEXTS, *LISTS, *MAPPINGS))
ANY = st.one_of(JSON, st.sampled_from(OBJECTS))
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
PROMPTS: tuple[Any, ...] = (
    *([True, 5], [1, None], [1.0], [2**31], [2**63], [-1], [], [[]], [1] * 100_000, "", "\ud800", None, 5, {}, b"ab"),
    *(["\ud800"], [10**400], np.array([1, 2]), np.array([1.5]), [np.int64(4)], [np.True_], (1, 2), range(4)),
)
