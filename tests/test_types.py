from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import RequestError
from slipstream.types import SamplingParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number of at least 0 and at most 100, not -0.1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "top_p must be"),
        ({"top_k": -2}, "top_k must be an integer of at least -1, not -2"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, not 0"),
        ({"max_tokens": True}, "max_tokens must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**64}, "seed must be"),
        ({"stop": [""]}, "stop must be non-empty strings"),
        ({"stop_token_ids": [-5]}, "stop_token_ids must be"),
        ({"temprature": 1.0}, r"unknown sampling parameter 'temprature'; did you mean 'temperature'\?"),
    ],
)
def test_out_of_range_parameters(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams.from_dict(values)
    assert "\n" not in str(caught.value)


def test_defaults_come_from_the_model_then_from_the_engine() -> None:
    model = SamplingParams(temperature=0.6, top_k=50)
    chosen = SamplingParams(top_k=-1).with_defaults(model)
    assert (chosen.temperature, chosen.top_k, chosen.top_p) == (0.6, 0, 1.0)
    chosen = SamplingParams(temperature=0).with_defaults(model)
    assert (chosen.temperature, chosen.top_k) == (0.0, 50)
    assert SamplingParams().with_defaults(SamplingParams()).temperature == 1.0
