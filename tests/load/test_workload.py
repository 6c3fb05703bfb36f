from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.load.arrivals import read_trace
from slipstream.load.words import WORDS
from slipstream.load.workload import FIRST_WARMUP, Asked, BodyFormat, Synthetic, Trace, read_data_set


def words_of(asked: Asked) -> list[str]:
    assert isinstance(asked.prompt, str)
    return asked.prompt.split(" ")


def test_synthetic_prompts_have_the_length_and_are_all_different() -> None:
    workload = Synthetic("7", prompt_len=40, output_len=16)
    asked = [workload.request(idx) for idx in (*range(50), *range(FIRST_WARMUP, FIRST_WARMUP + 5))]
    assert {len(words_of(one)) for one in asked} == {40}
    assert {one.max_tokens for one in asked} == {16}
    assert len({one.prompt for one in asked}) == 55
    assert {word for one in asked for word in words_of(one)} <= set(WORDS)


def test_a_request_depends_on_seed_and_index_alone() -> None:
    first, again, other = (Synthetic(seed, 20, 8, spread=0.5, prefix_len=3) for seed in ("1/0", "1/0", "1/1"))
    assert [first.request(idx) for idx in range(9)] == [again.request(idx) for idx in reversed(range(9))][::-1]
    assert all(first.request(idx) != other.request(idx) for idx in range(9))


def test_prefix_is_shared_and_the_rest_is_not() -> None:
    workload = Synthetic("0", prompt_len=30, output_len=1, prefix_len=20)
    prompts = [words_of(workload.request(idx)) for idx in range(20)]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 20


def test_lengths_are_spread_evenly() -> None:
    workload = Synthetic("0", prompt_len=100, output_len=50, spread=0.5)
    asked = [workload.request(idx) for idx in range(2000)]
    lengths = [len(words_of(one)) for one in asked]
    assert set(lengths) == set(range(50, 151))  # 2000 draws of 101 lengths: each is missed by one in 400 million
    assert sum(lengths) / 2000 == pytest.approx(100, abs=4 * 29.2 / 2000**0.5)  # of the uniform distribution
    assert {one.max_tokens for one in asked} == set(range(25, 76))


def test_token_ids() -> None:
    asked = Synthetic("0", 300, 4, prefix_len=10, vocab_size=50).request(3)
    assert isinstance(asked.prompt, list)
    assert len(asked.prompt) == 300
    assert set(asked.prompt) == set(range(50))


def test_words_are_words() -> None:
    assert len(set(WORDS)) == len(WORDS) > 400
    assert all(word.isalpha() and word.islower() and len(word) <= 9 for word in WORDS)


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def write(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


def test_data_set_of_every_form(tmp_path: Path) -> None:
    path = write(
        tmp_path / "set.jsonl",
        {"messages": MESSAGES, "max_tokens": 5},
        {"prompt": "héllo"},
        "",
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
    )
    data = read_data_set(path, output_len=64)
    expected = (Asked(MESSAGES, 5), Asked("héllo", 64), Asked("first", 64))
    assert data.asked == expected
    # Again from the beginning when it is used up; warming up begins there too.
    assert tuple(data.request(idx) for idx in (3, 4, 5)) == expected
    assert data.request(FIRST_WARMUP + 1) == expected[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2 is not JSON"),
        ("[1]", "line 2 is no JSON object"),
        ('{"question": "x"}', "line 2 has neither messages nor prompt nor turns"),
        ('{"prompt": ""}', "line 2: the prompt must be a text"),
        ('{"prompt": 7}', "line 2: the prompt must be a text"),
        ('{"messages": []}', "line 2: messages must be a list of objects"),
        ('{"messages": ["hi"]}', "line 2: messages must be a list of objects"),
        ('{"turns": []}', "line 2: turns must be a list of texts"),
        ('{"prompt": "x", "max_tokens": 0}', "line 2: max_tokens must be a positive integer, not 0"),
        ('{"prompt": "x", "max_tokens": "9"}', "line 2: max_tokens must be a positive integer, not '9'"),
    ],
)
def test_bad_data_set(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_data_set(write(tmp_path / "set.jsonl", {"prompt": "x"}, line), 1)


def test_data_set_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dataset cannot be read"):
        read_data_set(tmp_path / "none.jsonl", 1)
    with pytest.raises(ConfigError, match="has no requests"):
        read_data_set(write(tmp_path / "empty.jsonl", ""), 1)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="--dataset cannot be read"):
        read_data_set(tmp_path / "bytes.jsonl", 1)


def trace_of(path: Path, **options: Any) -> Trace:
    return Trace(read_trace(path, **{"unit": "auto", "speed": 1.0, "output_len": 7, **options}), "5")


def test_trace_in_seconds(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 12.5, "prompt_len": 30, "output_len": 4},
        {"timestamp": 10, "prompt": "what was asked"},
        {"timestamp": 11, "messages": MESSAGES, "max_tokens": 3},
    )
    trace = trace_of(path)
    assert [entry.at for entry in trace.entries] == [0.0, 1.0, 2.5]
    assert trace.request(0) == Asked("what was asked", 7)
    assert trace.request(1) == Asked(MESSAGES, 3)
    assert len(words_of(trace.request(2))) == 30
    assert trace.request(2).max_tokens == 4
    assert [entry.at for entry in trace_of(path, speed=2.0).entries] == [0.0, 0.5, 1.25]
    assert [entry.at for entry in trace_of(path, unit="ms").entries] == pytest.approx([0.0, 0.001, 0.0025])


def test_trace_of_mooncake(tmp_path: Path) -> None:
    """Timestamps in ms; requests that begin with the same blocks of 512 tokens begin with the same words."""
    entries = [
        {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
        {"timestamp": 3052, "input_length": 1300, "output_length": 9, "hash_ids": [46, 47, 99]},
        {"timestamp": 3052, "input_length": 200, "output_length": 1, "hash_ids": [46]},
    ]
    trace = trace_of(write(tmp_path / "trace.jsonl", *entries))
    assert [entry.at for entry in trace.entries] == [0.0, 3.052, 3.052]
    first, second, third = sorted((words_of(trace.request(idx)) for idx in range(3)), key=len, reverse=True)
    assert [len(first), len(second), len(third)] == [1300, 1100, 200]
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:]
    assert third == first[:200]
    # The blocks of the trace are not in the server's cache before it begins.
    assert words_of(trace.request(FIRST_WARMUP))[:512] != first[:512]
    assert [entry.at for entry in trace_of(tmp_path / "trace.jsonl", unit="s").entries] == [0.0, 3052.0, 3052.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x"}, "timestamp must be a number, not None"),
        ({"timestamp": "1", "prompt": "x"}, "timestamp must be a number, not '1'"),
        ('{"timestamp": NaN, "prompt": "x"}', "timestamp must be a number, not nan"),
        ({"timestamp": 1}, "has neither a prompt nor its length"),
        ({"timestamp": 1, "input_length": 0}, "input_length must be a positive integer, not 0"),
        ({"timestamp": 1, "input_length": 5, "output_length": -1}, "output_length must be a positive integer"),
        ({"timestamp": 1, "input_length": 5, "hash_ids": "a"}, "hash_ids must be a list of integers"),
    ],
)
def test_bad_trace(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace_of(write(tmp_path / "trace.jsonl", line))


def body(api: str, prompt: Any, **options: Any) -> dict[str, Any]:
    settings = {"temperature": 0.0, "ignore_eos": True, "include_usage": True, **options}
    found = json.loads(BodyFormat(api, "m", **settings).encode(Asked(prompt, 9)))
    assert isinstance(found, dict)
    return found


def test_bodies() -> None:
    common = {"model": "m", "max_tokens": 9, "temperature": 0.0, "stream": True, "ignore_eos": True}
    common["stream_options"] = {"include_usage": True}
    assert body("chat", "hi") == {**common, "messages": [{"role": "user", "content": "hi"}]}
    assert body("chat", MESSAGES) == {**common, "messages": MESSAGES}
    assert body("completions", "hi") == {**common, "prompt": "hi"}
    assert body("completions", [1, 2]) == {**common, "prompt": [1, 2]}
    assert body("completions", MESSAGES) == {**common, "prompt": "be brief\n\nhi"}


def test_fields_added_and_taken_away() -> None:
    plain = body("chat", "hi", ignore_eos=False, include_usage=False)
    assert {"ignore_eos", "stream_options"}.isdisjoint(plain)
    extra = {"top_k": 5, "temperature": None, "max_tokens": None, "max_completion_tokens": 4}
    changed = body("chat", "hi", extra=extra)
    assert {"temperature", "max_tokens"}.isdisjoint(changed)
    assert (changed["top_k"], changed["max_completion_tokens"]) == (5, 4)
