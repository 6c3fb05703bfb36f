"""What a user may say of speculation, in every spelling, and what is refused with one line."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from slipstream.config import DraftModel, EngineOptions
from slipstream.engine.resolve import resolve
from slipstream.errors import ConfigError
from slipstream.speculate.options import read_speculation
from slipstream.speculative_config import SpeculativeConfig
from tests.speculations import speculation
from tests.test_config import CPU, MODEL

NGRAM = speculation("ngram", 7, adaptive=True)


def with_matches(shortest: int, longest: int) -> SpeculativeConfig:
    return replace(NGRAM, settings={"prompt_lookup_min": shortest, "prompt_lookup_max": longest})


KNOWN = "; known are ngram, draft_model, eagle, eagle3, mtp, dflash, early_exit, certain_tokens"


def read(**options: Any) -> SpeculativeConfig | None:
    return read_speculation(EngineOptions.from_dict(options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"speculate": "none"}, None),
        ({"speculate": "none", "k": 3}, None),
        ({"speculate": "ngram"}, NGRAM),
        ({"speculate": "ngram", "k": 1}, speculation("ngram", 1)),
        ({"speculate": "ngram", "k": 16}, speculation("ngram", 16)),
        (
            {"speculate": "draft_model", "draft_model": "m"},
            speculation("draft_model", 5, model="m", adaptive=True),
        ),
        ({"speculate": "draft_model", "draft_model": "m", "k": 5}, speculation("draft_model", 5, model="m")),
    ],
)
def test_short_forms(options: dict[str, Any], expected: SpeculativeConfig | None) -> None:
    assert read(**options) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram"}, NGRAM),
        ({"method": "ngram", "num_speculative_tokens": 4}, speculation("ngram", 4)),
        ({"method": "ngram", "num_speculative_tokens": 4, "adaptive": True}, replace(NGRAM, num_drafts=4)),
        ({"method": "ngram", "adaptive": False}, replace(NGRAM, adaptive=False)),
        ({"method": "ngram", "model": None, "verify": None, "acceptance_rates": None}, NGRAM),
        ({"model": "ngram"}, NGRAM),
        ({"model": "[ngram]"}, NGRAM),
        ({"method": "ngram", "model": "[ngram]"}, NGRAM),
        ({"method": "ngram", "prompt_lookup_max": 2}, with_matches(1, 2)),
        ({"method": "ngram", "prompt_lookup_min": 2}, with_matches(2, 5)),
        ({"method": "ngram", "prompt_lookup_min": 7}, with_matches(7, 7)),
        (
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 8},
            with_matches(2, 8),
        ),
        ({"method": "draft_model", "model": "m"}, speculation("draft_model", 5, model="m", adaptive=True)),
        ({"model": "org/m", "num_speculative_tokens": 5}, speculation("draft_model", 5, model="org/m")),
        ({"method": "ngram", "verify": "match"}, NGRAM),
        ({"method": "ngram", "verify": "rejection"}, replace(NGRAM, verify="rejection")),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "verify": "synthetic", "acceptance_rates": [0.9, 0]},
            speculation("ngram", 2, "synthetic", acceptance_rates=(0.9, 0.0)),
        ),
        (MappingProxyType({"method": "ngram"}), NGRAM),
    ],
)
def test_vllms_spelling(given: dict[str, Any], expected: SpeculativeConfig) -> None:
    assert read(speculative_config=given) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "ngrm"}, "unknown method 'ngrm' in speculate; did you mean 'ngram'?"),
        ({"speculate": "draft"}, "unknown method 'draft' in speculate; did you mean 'draft_model'?"),
        ({"speculate": "xyz"}, "unknown method 'xyz' in speculate" + KNOWN),
        ({"speculate": "two\nlines"}, "unknown method 'two\\nlines' in speculate" + KNOWN),
        ({"speculate": ""}, "unknown method '' in speculate" + KNOWN),
        ({"speculate": True}, "unknown method True in speculate" + KNOWN),
        ({"speculate": "ngram", "k": 0}, "k must be an integer from 1 to 16, not 0"),
        ({"speculate": "ngram", "k": 17}, "k must be an integer from 1 to 16, not 17"),
        ({"speculate": "ngram", "k": -1}, "k must be an integer from 1 to 16, not -1"),
        ({"speculate": "ngram", "k": True}, "k must be an integer from 1 to 16, not True"),
        ({"speculate": "ngram", "k": 2.0}, "k must be an integer from 1 to 16, not 2.0"),
        ({"k": 4}, "k has no effect without speculate: name a method"),
        ({"draft_model": "m"}, "draft_model has no effect without speculate: name a method"),
        (
            {"speculate": "draft_model"},
            "draft_model needs a model: name one as draft_model, or as model in speculative_config",
        ),
        (
            {"speculate": "ngram", "draft_model": "m"},
            "ngram drafts from a request's own tokens and takes no model; leave out 'm'",
        ),
    ],
)
def test_wrong_short_forms(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**options)
    assert str(caught.value) == message
    assert "\n" not in message


RATES = "acceptance_rates: 2 numbers from 1 down to 0, entry i for the probability that the first i + 1 drafts are all"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "speculative_config names no method" + KNOWN),
        ([], 'speculative_config must be a JSON object such as {"method": "ngram"}'),
        ("ngram", 'speculative_config must be a JSON object such as {"method": "ngram"}'),
        ({"method": "medusa"}, "unknown method 'medusa' in speculative_config" + KNOWN),
        ({"method": "ngrams"}, "unknown method 'ngrams' in speculative_config; did you mean 'ngram'?"),
        ({"method": ["ngram"]}, "unknown method ['ngram'] in speculative_config; did you mean 'ngram'?"),
        (
            {"method": "ngram", "num_speculative_token": 4},
            "unknown key 'num_speculative_token' in speculative_config; did you mean 'num_speculative_tokens'?",
        ),
        (
            {"method": "ngram", "prompt_lookup": 4},
            "unknown key 'prompt_lookup' in speculative_config; did you mean 'prompt_lookup_min'?",
        ),
        ({"method": "ngram", "zzz": 4}, "unknown key 'zzz' in speculative_config"),
        ({"method": "ngram", 5: 4}, "unknown key 5 in speculative_config"),
        (
            {"method": "ngram", "adaptive": "yes"},
            "adaptive must be true or false, not 'yes'",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 99},
            "num_speculative_tokens must be an integer from 1 to 16, not 99",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": "4"},
            "num_speculative_tokens must be an integer from 1 to 16, not '4'",
        ),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min must be an integer from 1 to 32, not 0"),
        ({"method": "ngram", "prompt_lookup_min": "a"}, "prompt_lookup_min must be an integer from 1 to 32, not 'a'"),
        ({"method": "ngram", "prompt_lookup_max": 33}, "prompt_lookup_max must be an integer from 1 to 32, not 33"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min 4 is above prompt_lookup_max 3; lower it",
        ),
        (
            {"model": "m", "prompt_lookup_max": 3},
            "prompt_lookup_max belongs to ngram; leave it out with draft_model",
        ),
        (
            {"method": "ngram", "model": "m"},
            "ngram drafts from a request's own tokens and takes no model; leave out 'm'",
        ),
        (
            {"method": "draft_model"},
            "draft_model needs a model: name one as draft_model, or as model in speculative_config",
        ),
        (
            {"method": "draft_model", "model": 7},
            "draft_model needs a model: name one as draft_model, or as model in speculative_config",
        ),
        ({"method": "ngram", "verify": "mach"}, "verify must be one of match, rejection, synthetic, not 'mach'"),
        ({"method": "ngram", "verify": False}, "verify must be one of match, rejection, synthetic, not False"),
        (
            {"method": "ngram", "acceptance_rates": [1, 1, 1, 1]},
            "acceptance_rates force acceptance; they need verify 'synthetic'",
        ),
        *(
            (
                {"method": "ngram", "num_speculative_tokens": 2, "verify": "synthetic", "acceptance_rates": rates},
                f"verify 'synthetic' needs {RATES} accepted, not {rates!r}",
            )
            for rates in (None, [], [0.5], [0.5, 0.4, 0.3], [0.4, 0.5], [1.5, 0.5], [0.5, -0.1], ["a", "b"], 0.5)
        ),
    ],
)
def test_wrong_speculative_config(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(speculative_config=given)
    assert str(caught.value) == message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("short", "name"), [({"speculate": "ngram"}, "speculate"), ({"k": 3}, "k"), ({"draft_model": "m"}, "draft_model")]
)
def test_one_way_to_say_it_at_a_time(short: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(speculative_config={"method": "ngram"}, **short)
    assert str(caught.value) == f"{name} and speculative_config conflict; use one of them"


@pytest.mark.parametrize(
    ("config", "lengths", "initial"),
    [
        (NGRAM, (0, 1, 2, 3, 5, 7), 3),
        (replace(NGRAM, num_drafts=2), (0, 1, 2), 2),
        (replace(NGRAM, num_drafts=4), (0, 1, 2, 3, 4), 3),
        (replace(NGRAM, num_drafts=16), (0, 1, 2, 3, 5, 7, 11, 16), 3),
        (speculation("ngram", 6), (6,), 6),
    ],
)
def test_what_a_length_is_chosen_from(config: SpeculativeConfig, lengths: tuple[int, ...], initial: int) -> None:
    assert (config.lengths, config.initial_length) == (lengths, initial)


def test_only_drafts_from_the_text_alone_are_always_as_many() -> None:
    assert [replace(NGRAM, num_drafts=7).num_proposed(k) for k in (0, 1, 5, 7)] == [0, 7, 7, 7]
    for other in (
        replace(NGRAM, adaptive=False),
        replace(NGRAM, verify="synthetic"),
        speculation("eagle3", 7, adaptive=True),
    ):
        assert [other.num_proposed(k) for k in (0, 1, 5)] == [0, 1, 5]


def test_a_length_that_adapts_stays_within_the_tokens_of_a_step() -> None:
    few = resolve(EngineOptions(speculate="ngram", max_num_seqs=8, max_num_batched_tokens=32), CPU, MODEL)
    assert few.speculative is not None
    assert few.speculative.lengths == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match="max_num_batched_tokens 32 is below max_num_seqs 8 x 6"):
        resolve(EngineOptions(speculate="ngram", k=5, max_num_seqs=8, max_num_batched_tokens=32), CPU, MODEL)


def test_only_synthetic_acceptance_is_synthetic() -> None:
    assert [replace(NGRAM, verify=mode).is_synthetic for mode in ("match", "rejection", "synthetic")] == [0, 0, 1]


def test_the_engines_configuration_has_it() -> None:
    config = resolve(EngineOptions(speculate="ngram", k=3), CPU, MODEL)
    assert config.speculative == speculation("ngram", 3)
    assert config.num_drafts == 3
    plain = resolve(EngineOptions(), CPU, MODEL)
    assert (plain.speculative, plain.num_drafts) == (None, 0)


def test_a_draft_model_must_reach_as_far_as_the_target() -> None:
    options = EngineOptions(speculate="draft_model", draft_model="m")
    short = DraftModel(replace(MODEL, max_position=1024))
    with pytest.raises(ConfigError, match="context of 1024 is shorter than the target's 2048; set max_model_len to at"):
        resolve(options, CPU, MODEL, draft=short)
    assert resolve(replace(options, max_model_len=1024), CPU, MODEL, draft=short).draft_model == short.config


def test_options_travel_to_another_process() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 2, "verify": "synthetic", "acceptance_rates": [0.5, 0.25]}
    options = EngineOptions(speculative_config=given)
    assert pickle.loads(pickle.dumps(options)) == options
    assert msgspec.json.decode(msgspec.json.encode(options), type=EngineOptions) == options
    config = resolve(options, CPU, MODEL)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=type(config)) == config


@pytest.mark.parametrize(("num_modules", "k", "num_turns"), [(1, 3, 1), (3, 1, 1), (3, 2, 2), (2, 5, 2)])
def test_modules_keep_what_the_next_one_goes_on_from(num_modules: int, k: int, num_turns: int) -> None:
    """One hidden state a token for every module but the last that has a turn, in the memory of the cache."""
    memory = 1 << 24
    options = EngineOptions(
        speculative_config={"method": "mtp", "num_speculative_tokens": k}, kv_cache_memory_bytes=memory, max_num_seqs=99
    )
    head = replace(MODEL, num_layers=num_modules)
    config = resolve(options, CPU, MODEL, draft=DraftModel(head, num_modules=num_modules))
    keys = sum(2 * m.num_layers * m.num_kv_heads * m.head_dim * 4 for m in (MODEL, head))
    page_bytes = 16 * (keys + (num_turns - 1) * MODEL.hidden_size * 4)
    assert config.num_draft_modules == num_turns
    assert config.cache.num_pages == memory // page_bytes + 1
    assert config.cache_bytes == config.cache.num_pages * page_bytes
