from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.load.settings import LoadSettings, Point


def test_points() -> None:
    assert LoadSettings().points() == [Point(streams=1), Point(streams=8), Point(streams=32)]
    assert LoadSettings(concurrency="4, 512,4").points() == [Point(streams=4), Point(streams=512)]
    assert LoadSettings(rate="0.5,inf").points() == [Point(rate=0.5), Point(rate=math.inf)]
    assert LoadSettings(trace="t.jsonl").points() == [Point()]
    points = (Point(streams=1), Point(streams=2), Point(rate=2.5), Point())
    assert [str(point) for point in points] == ["1 stream", "2 streams", "2.5 requests/s", "trace"]


@pytest.mark.parametrize(
    ("options", "point", "available", "expected"),
    [
        ({}, Point(streams=1), None, 16),
        ({}, Point(streams=100), None, 400),
        ({}, Point(rate=2.0), None, 200),
        ({"requests": 50}, Point(streams=8), None, 50),
        ({}, Point(streams=8), 480, 480),
        ({}, Point(streams=8), 3, 8),  # no stream is without a request
        ({"requests": 1000}, Point(streams=8), 3, 1000),
        ({"trace": "t"}, Point(), 77, 77),
        ({"trace": "t", "requests": 5}, Point(), 77, 5),
        ({"trace": "t", "requests": 100}, Point(), 77, 77),  # a trace says when for its own requests only
    ],
)
def test_number_of_requests(options: dict[str, Any], point: Point, available: int | None, expected: int) -> None:
    assert LoadSettings(**options).num_requests(point, available) == expected


@pytest.mark.parametrize(
    ("processes", "cores", "point", "expected"),
    [
        (None, 2, Point(streams=64), 1),
        (None, 16, Point(streams=64), 4),
        (None, 16, Point(streams=2), 2),
        (None, 192, Point(rate=9.0), 8),
        (3, 2, Point(streams=64), 3),
        (3, 2, Point(streams=1), 1),
        (500, 2, Point(rate=1.0), 100),
    ],
)
def test_number_of_processes(processes: int | None, cores: int, point: Point, expected: int) -> None:
    assert LoadSettings(processes=processes).num_processes(cores, point, 100) == expected


def test_end_of_sequence_is_ignored_unless_a_data_set_is_read() -> None:
    assert LoadSettings().sends_ignore_eos
    assert not LoadSettings(ignore_eos=False).sends_ignore_eos
    assert not LoadSettings(dataset="d").sends_ignore_eos
    assert LoadSettings(dataset="d", ignore_eos=True).sends_ignore_eos
    assert LoadSettings(trace="t").sends_ignore_eos


def test_goodput() -> None:
    expected = {"ttft": 200.0, "tpot": 20.5, "e2e": 5000.0}
    for given in (
        ("ttft:200 tpot:20.5 e2e:5000",),
        ("ttft:200,tpot:20.5", "e2e:5000"),
        ("ttft:200", "tpot:20.5,e2e:5e3"),
    ):
        assert LoadSettings(goodput=given).limits() == expected
    assert LoadSettings().limits() == {}
    assert LoadSettings(goodput=("ttft:200",)).with_limits(["tpot:20.5", "e2e:5000"]).limits() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api": "responses"}, "--api must be chat or completions, not 'responses'"),
        ({"concurrency": "1,two"}, "--concurrency must be positive numbers separated by commas, such as 1,8,32"),
        ({"concurrency": "0"}, "--concurrency must be positive numbers"),
        ({"rate": "0"}, "--rate 0: a rate must be a number above 0, not '0'"),
        ({"rate": "1,fast"}, "a rate must be a number above 0, not 'fast'"),
        ({"rate": "nan"}, "a rate must be a number above 0, not 'nan'"),
        ({"rate": "1", "concurrency": "1"}, "--concurrency and --rate are different loads; give one of them"),
        ({"rate": "1", "trace": "t"}, "--rate and --trace are different loads"),
        ({"trace": "t", "dataset": "d"}, "--trace and --dataset both say what is asked"),
        ({"trace_unit": "h"}, "--trace-unit must be auto, s or ms, not 'h'"),
        ({"trace_speed": 0.0}, "--trace-speed must be above 0, not 0"),
        ({"burstiness": -1.0}, "--burstiness must be above 0, not -1"),
        ({"timeout_s": math.inf}, "--timeout-s must be above 0, not inf"),
        ({"len_spread": 1.0}, "--len-spread must be at least 0 and below 1, not 1"),
        ({"temperature": -0.5}, "--temperature must be at least 0, not -0.5"),
        ({"requests": 0}, "--requests must be at least 1, not 0"),
        ({"requests": 10}, "--requests 10 are fewer than the 32 streams"),
        ({"warmup": -1}, "--warmup must be at least 0, not -1"),
        ({"prompt_len": 0}, "--prompt-len must be at least 1, not 0"),
        ({"output_len": 0}, "--output-len must be at least 1, not 0"),
        ({"prefix_len": 128}, "--prefix-len 128 leaves no word of its own to --prompt-len"),
        ({"vocab_size": 100}, "--vocab-size makes prompts of token ids, for synthetic prompts and --api completions"),
        ({"vocab_size": 1, "api": "completions"}, "--vocab-size must be at least 2, not 1"),
        ({"processes": 0}, "--processes must be at least 1, not 0"),
        ({"seed": -1}, "--seed must be at least 0, not -1"),
        ({"extra_body": (1,)}, "--extra-body must be a JSON object"),
        ({"goodput": ("tfft:200",)}, "--goodput knows ttft, tpot, e2e, not 'tfft'; did you mean 'ttft'?"),
        ({"goodput": ("ttft",)}, "--goodput ttft: the limit must be a number above 0, not ''"),
        ({"goodput": ("ttft:-1",)}, "the limit must be a number above 0, not '-1'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LoadSettings(**options)
    assert message in str(caught.value)


def test_limits_need_their_option() -> None:
    with pytest.raises(ConfigError, match="unexpected argument 'tpot:5'"):
        LoadSettings().with_limits(["tpot:5"])
