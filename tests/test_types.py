from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import RequestError
from slipstream.sampling_params import SamplingParams


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
        ({"bad_words": [""]}, "bad_words must be non-empty strings"),
        ({"top_n_sigma": -1}, "top_n_sigma must be a number of at least 0 and at most 100, not -1"),
        ({"extra": [1]}, r"extra must map names of sampling parameters to values, not \[1\]"),
        ({"extra": {"top_k": 1}}, "top_k is a field of SamplingParams; give it outside of extra"),
        ({"extra": {"topk": 1}}, r"unknown sampling parameter 'topk'; did you mean 'top_k'\?"),
        ({"min_p": 1.5}, "min_p must be a number of at least 0 and at most 1, not 1.5"),
        ({"presence_penalty": 2.5}, "presence_penalty must be a number of at least -2 and at most 2, not 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
        ({"logprobs": 21}, "logprobs must be an integer of at least 0 and at most 20, not 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be"),
        ({"n": 0}, "n must be an integer of at least 1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is above max_tokens 4; lower it"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias holds 'x', which is not a token id"),
        ({"logit_bias": {1: 101}}, "values in logit_bias must be a number of at least -100 and at most 100, not 101"),
        ({"logit_bias": dict.fromkeys(range(301), 0.0)}, "logit_bias has 301 entries; at most 300"),
        ({"stop_token_ids": [-5]}, "stop_token_ids must be"),
        ({"max_k": -1}, "max_k must be an integer of at least 0, not -1"),
        ({"max_k": True}, "max_k must be an integer"),
        ({"speculate": "no"}, "speculate must be true or false, not 'no'"),
        ({"speculate": None}, "speculate must be true or false, not None"),
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


def test_logit_bias_takes_ids_as_json_spells_them() -> None:
    assert SamplingParams(logit_bias={"12": 3, 4: -1.5}).logit_bias == {12: 3.0, 4: -1.5}  # type: ignore[dict-item]


@pytest.mark.parametrize(("name", "hint"), [("temprature", "temperature"), ("topk", "top_k"), ("stops", "stop")])
def test_a_misspelt_parameter_has_a_hint(name: str, hint: str) -> None:
    values: dict[str, Any] = {name: 1}
    with pytest.raises(RequestError, match=f"unknown sampling parameter '{name}'; did you mean '{hint}'"):
        SamplingParams(**values)
