from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.attention.gdn import DeltaNetSpec
from slipstream.cache_spec import row_bytes
from slipstream.config import EngineOptions, Hardware, ModelConfig, NetworkSize, RopeConfig, cache_dir
from slipstream.engine.resolve import resolve
from slipstream.errors import ConfigError

CPU = Hardware(device="cpu", free_memory_bytes=8 * 2**30, dtype_works=True)
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=2048,
    rope=RopeConfig(rotary_dim=16),
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 4096}, "max_model_len 4096 is beyond the model's context of 2048; lower it"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens 32 is below max_num_seqs 64"),
        ({"block_size": 12}, "block_size must be a power of two, not 12"),
        ({"dtype": "float8"}, "dtype must be one of auto, float64"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, sim, not 'tpu'"),
        ({"attention_backend": "refrence"}, "did you mean 'reference'"),
        ({"kv_cache_memory_bytes": 100}, "holds no page of 8192 bytes; raise kv_cache_memory_bytes"),
        ({"steps_in_flight": 0}, "steps_in_flight must be a positive integer"),
    ],
)
def test_wrong_options_say_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineOptions.from_dict(options), CPU, MODEL)


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_model_length'; did you mean 'max_model_len'\?"):
        EngineOptions.from_dict({"max_model_length": 5})


def test_defaults_are_filled_in() -> None:
    config = resolve(EngineOptions(), CPU, MODEL)
    assert config.dtype == "float32" and config.steps_in_flight == 1
    assert config.scheduler.max_model_len == 2048
    # Two types of value, two layers, two heads of 16 values in four bytes: 512 bytes a token.
    assert MODEL.kv_bytes_per_token("float32") == 512
    assert config.cache.num_usable_tokens == 32 * 2048, "no more than the most requests can use"
    small = resolve(EngineOptions(kv_cache_memory_bytes=512 * 16 * 10), CPU, MODEL)
    assert small.cache.num_usable_tokens == 160


def test_a_context_of_millions_has_tables_for_what_the_cache_holds() -> None:
    """No tensor bears out the length of the context; what a damaged file says of it must not take gigabytes."""
    long = replace(MODEL, max_position=1 << 24)
    position_bytes = 4 * (16 + 32 + 1)  # a rotary table in float32, and the tokens of 32 requests and a scratch row
    small_cache = EngineOptions(kv_cache_memory_bytes=512 * 16 * 10)
    assert resolve(small_cache, CPU, long).scheduler.max_model_len == (256 << 20) // position_bytes
    large_cache = EngineOptions(kv_cache_memory_bytes=512 * 16 * 200_000)
    assert resolve(large_cache, CPU, long).scheduler.max_model_len == 200_000 * 16
    asked_for = EngineOptions(kv_cache_memory_bytes=512 * 16 * 10, max_model_len=1 << 22)
    assert resolve(asked_for, CPU, long).scheduler.max_model_len == 1 << 22
    windowed = replace(long, window_rope=RopeConfig(rotary_dim=16))
    limit = resolve(small_cache, CPU, windowed).scheduler.max_model_len
    assert limit == (256 << 20) // (position_bytes + 4 * 16)


def test_a_type_that_crashes_is_refused() -> None:
    broken = Hardware(device="cpu", free_memory_bytes=2**30, dtype_works=False)
    with pytest.raises(ConfigError, match="bfloat16 matrix products crash on this CPU; use dtype float32"):
        resolve(EngineOptions(dtype="bfloat16"), broken, MODEL)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLIPSTREAM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "slipstream"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


GPU = Hardware(device="cuda", free_memory_bytes=70 * 2**30, total_memory_bytes=80 * 2**30, dtype_works=True)


def test_a_gpu_has_its_own_defaults() -> None:
    config = resolve(EngineOptions(), GPU, MODEL, NetworkSize(10**9, 2 * 10**9))
    assert (config.dtype, config.attention_backend, config.cudagraph_mode) == ("bfloat16", "triton", "full")
    assert (config.steps_in_flight, config.scheduler.max_num_seqs) == (2, 256)
    assert resolve(EngineOptions(), GPU, replace(MODEL, dtype="float16")).dtype == "float16"
    # A batch of all rows has a graph of its own.
    assert 100 in resolve(EngineOptions(max_num_seqs=100), GPU, MODEL).cudagraph_sizes


@pytest.mark.parametrize(("num_params", "largest"), [(10**8, 8192), (10**9, 3072), (8 * 10**9, 512)])
def test_a_small_model_has_graphs_for_long_prompts(num_params: int, largest: int) -> None:
    config = resolve(EngineOptions(max_num_batched_tokens=8192), GPU, MODEL, NetworkSize(num_params, 2 * num_params))
    assert config.cudagraph_sizes[-1] == largest


def test_the_cache_of_a_gpu_is_what_others_and_weights_leave() -> None:
    long = replace(MODEL, max_position=2**20)
    page_bytes = 16 * long.kv_bytes_per_token("bfloat16")

    def cache_bytes(num_params: int, share: float = 0.9) -> int:
        options = EngineOptions(gpu_memory_utilization=share, max_num_seqs=4096)
        return resolve(options, GPU, long, NetworkSize(num_params, 2 * num_params)).cache.num_pages * page_bytes

    light, heavy = cache_bytes(10**9), cache_bytes(11 * 10**9)
    assert light < 0.9 * 80 * 2**30 - 10 * 2**30 - 2 * 10**9
    assert light - heavy == pytest.approx(2 * 10**10, abs=page_bytes)
    assert light - cache_bytes(10**9, 0.8) == pytest.approx(8 * 2**30, abs=page_bytes)
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs"):
        cache_bytes(40 * 10**9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "float64 runs on a CPU only"),
        ({"attention_backend": "cpu"}, "attention_backend cpu does not run on cuda; use triton or flashinfer or flex"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0 and at most 1, not 1.5"),
    ],
)
def test_what_a_gpu_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineOptions.from_dict(options), GPU, MODEL)


KEYS = MODEL.keys_and_values
HYBRID = replace(
    MODEL,
    num_layers=4,
    attention_gate=True,
    layer_caches=(*[DeltaNetSpec(num_k_heads=2, num_v_heads=4, k_dim=8, v_dim=16, conv_width=4)] * 3, KEYS),
)
# Of a request without drafts: the last three inputs and one more, 96 channels of two bytes, and one state in float32.
STATE_BYTES = 3 * (4 * 96 * 2 + 4 * 8 * 16 * 4)


def test_states_and_pages_are_sized_together() -> None:
    assert row_bytes(HYBRID.cache_specs, 0, "bfloat16") == STATE_BYTES
    # With three drafts a row keeps four states, and three inputs more.
    assert row_bytes(HYBRID.cache_specs, 3, "bfloat16") == 3 * (7 * 96 * 2 + 4 * 4 * 8 * 16 * 4)
    assert HYBRID.kv_bytes_per_token("bfloat16") == MODEL.kv_bytes_per_token("bfloat16") // 2, "one layer has keys"
    page_bytes = 16 * HYBRID.kv_bytes_per_token("bfloat16")
    given = {"dtype": "bfloat16", "max_num_seqs": 31, "max_model_len": 512}
    memory = 32 * STATE_BYTES + 10 * page_bytes
    config = resolve(EngineOptions.from_dict({**given, "kv_cache_memory_bytes": memory}), GPU, HYBRID)
    assert config.cache.num_pages == 10 + 1
    assert config.cache_bytes == 11 * page_bytes + 32 * STATE_BYTES
    with pytest.raises(ConfigError, match=r"the states of 31 requests with 0 drafts .* \(at most 28 fit\)"):
        given["kv_cache_memory_bytes"] = 30 * STATE_BYTES - 1
        resolve(EngineOptions.from_dict(given), GPU, HYBRID)


def test_prefix_caching_of_states_is_refused() -> None:
    asked = resolve(EngineOptions(), GPU, HYBRID).scheduler
    assert not asked.prefix_caching
    assert "recurrent layers" in asked.prefix_caching_refused
    assert asked.least_saved is None, "no pages are shared, so none are read once"
    silent = resolve(EngineOptions(enable_prefix_caching=False), GPU, HYBRID).scheduler
    assert (silent.prefix_caching, silent.prefix_caching_refused) == (False, "")
    usual = resolve(EngineOptions(), GPU, MODEL).scheduler
    assert (usual.prefix_caching, usual.prefix_caching_refused) == (True, "")


@pytest.mark.parametrize(("adaptive", "beside"), [(True, 7), (False, None)])
def test_beside_prompts_as_many_drafts_are_made_as_a_graph_has(adaptive: bool, beside: int | None) -> None:
    """N-gram drafts that adapt are always made as far as they go."""
    options = EngineOptions(speculative_config={"method": "ngram", "adaptive": adaptive})
    assert resolve(options, GPU, MODEL).scheduler.drafts_beside_prompts == beside
