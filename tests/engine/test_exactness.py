"""``--exact``: what cannot keep it is refused in one line, and what resolves then cannot break it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, ConfigError
from slipstream.attention.cross import CrossSpec
from slipstream.attention.gdn import DeltaNetSpec
from slipstream.attention.mla import LatentSpec
from slipstream.cache_spec import CacheSpec
from slipstream.config import UNMEASURED, EngineConfig, EngineOptions, ModelConfig, NetworkSize
from slipstream.encoder_config import EncoderConfig
from slipstream.engine.resolve import resolve
from slipstream.speculate.options import read_speculation
from tests import tiny_models
from tests.test_config import CPU, GPU, MODEL

RATES = {"verify": "synthetic", "acceptance_rates": [0.5]}
DELTA_NET = DeltaNetSpec(2, 2, 16, 16, 4)
LATENT = LatentSpec(2, 16, 8, 8, 8)


class Unknown(CacheSpec):
    """A kind of cache from outside, which says nothing."""


def resolved(model: ModelConfig = MODEL, size: NetworkSize = UNMEASURED, **options: Any) -> EngineConfig:
    return resolve(EngineOptions.from_dict({"exact": True, **options}), GPU, model, size)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (replace(MODEL, layer_caches=(MODEL.keys_and_values, DELTA_NET)), "recurrent layers compute prompts in chunks"),
        (replace(MODEL, layer_caches=(LATENT, LATENT)), r"latent attention \(MLA\) computes prompts and decodes"),
        (replace(MODEL, layer_caches=(MODEL.keys_and_values, CrossSpec(2, 16, 100))), "reads an encoder's output"),
        (replace(MODEL, layer_caches=(Unknown(), Unknown())), "a kind of cache of this model does not say that it"),
    ],
)
def test_layers_that_cannot_keep_it(model: ModelConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^exact is not possible: [^\n]*{reason}[^\n]*$"):
        resolved(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_backend": "flashinfer"}, "exact is not possible with attention_backend flashinfer; use triton"),
        ({"attention_backend": "flex"}, "exact is not possible with attention_backend flex; use triton"),
        ({"cascade": "always"}, "requests share a prefix; use cascade auto or never"),
        ({"speculative_config": {"method": "ngram", "verify": "rejection"}}, "verify rejection tokens depend on the"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1, **RATES}},
            "verify synthetic tokens depend on the drafts; use verify match",
        ),
    ],
)
def test_options_that_cannot_keep_it(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{reason}[^\n]*$"):
        resolved(**options)
    assert not resolve(EngineOptions.from_dict(options | {"attention_backend": "auto"}), GPU, MODEL).exact


def test_weights_that_cannot_keep_it() -> None:
    with pytest.raises(ConfigError, match="exact is not possible: products with weights in int4 depend on the batch"):
        resolved(size=NetworkSize(10, 10, "int4", "products with weights in int4"))


def test_a_model_without_texts() -> None:
    encoder = replace(MODEL, encoder=EncoderConfig(), layer_caches=())
    with pytest.raises(ConfigError, match="encodes texts and generates none"):
        resolved(encoder)


def test_what_it_resolves_to() -> None:
    config = resolved(speculative_config={"method": "ngram"})
    assert config.exact and config.attention_backend == "triton"
    assert config.scheduler.least_saved is None, "no cascade"
    plain = resolve(EngineOptions(), GPU, MODEL)
    assert not plain.exact and plain.scheduler.least_saved is not None
    # The simulated device has the GPU's kernels; its usual definition attends in another way.
    assert (
        resolve(EngineOptions(exact=True, device="sim"), replace(CPU, device="sim"), MODEL).attention_backend
        == "triton"
    )


def test_which_verification_keeps_tokens() -> None:
    for verify in ("match", "rejection"):
        options = EngineOptions(speculative_config={"method": "ngram", "verify": verify})
        speculative = read_speculation(options)
        assert speculative is not None and speculative.keeps_tokens == (verify == "match")


@pytest.mark.parametrize(
    ("variant", "options", "reason"),
    [
        ("llama", {"dtype": "float64"}, "on a CPU products with weights in float64 depend on the batch"),
        (
            "llama",
            {"attention_backend": "reference"},
            "exact is not possible with attention_backend reference; use cpu",
        ),
        ("qwen3-moe", {}, "on a CPU experts in float32 depend on the batch"),
        ("gemma3", {}, "on a CPU the layers of Gemma3ForCausalLM are not computed by C kernels as a whole"),
    ],
)
def test_models_and_a_cpu(tmp_path: Path, variant: str, options: dict[str, Any], reason: str) -> None:
    tiny_models.save(tiny_models.build(variant), tmp_path)
    with pytest.raises(ConfigError, match=f"{reason}[^\n]*$"):
        LLM(str(tmp_path), exact=True, speculate="none", **{"device": "cpu", **options})
