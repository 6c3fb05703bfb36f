"""Qwen3-Next: prompts in chunks, what its config may say, and tensors that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.attention import gdn
from slipstream.attention.gdn import DeltaNetSpec, GDNBackend
from slipstream.config import EngineOptions, ModelConfig
from slipstream.engine.build import build_engine
from slipstream.errors import ConfigError, ModelError
from slipstream.llm import LLM
from slipstream.models import delta_net
from slipstream.models.load import Placement, load_weights, measure_model
from slipstream.models.qwen3_next import Qwen3Next
from slipstream.models.shapes import shape_config, weight_bytes
from slipstream.sampling_params import SamplingParams
from tests import tiny_models
from tests.models.heads.test_draft_heads import Run
from tests.models.heads.tiny_mtp import random_mtp
from tests.models.test_parity import all_logits

VARIANTS = [name for name in tiny_models.VARIANTS if name.startswith("qwen3-next")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_whatever_the_chunks(variant: str, tmp_path: Path) -> None:
    """Chunks of 16 go through the rule again and again, one of 512 holds the prompt, those of 3 are few tokens each."""
    reference = tiny_models.build(variant)
    tiny_models.save(reference, tmp_path)
    prompt = torch.randint(0, 256, (1, 150), generator=torch.Generator().manual_seed(1))
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    told = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 64}
    expected = reference.generate(prompt, **told)[0, 150:].tolist()
    for chunk in (3, 16, 512):
        options = EngineOptions(model=str(tmp_path), dtype="float32", long_prefill_token_threshold=chunk)
        with LLM(build=lambda options=options: build_engine(options)) as llm:
            params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            assert llm.generate(prompt[0].tolist(), params)[0].token_ids == expected, f"chunks of {chunk}"
    assert len(set(expected)) > 8, "a stuck model would prove nothing"


def config(**changes: Any) -> dict[str, Any]:
    hf: dict[str, Any] = tiny_models.build("qwen3-next").config.to_dict()
    return {**hf, "architectures": ["Qwen3NextForCausalLM"], **changes}


def layers_with_states(config: ModelConfig) -> list[int]:
    return [idx for idx, spec in enumerate(config.cache_specs) if isinstance(spec, DeltaNetSpec)]


def test_layers_by_interval_and_by_name() -> None:
    by_interval = Qwen3Next.read_config(config(layer_types=None, full_attention_interval=2))
    assert layers_with_states(by_interval) == [0, 2]
    usual = Qwen3Next.read_config(config(layer_types=None))
    assert layers_with_states(usual) == [0, 1, 2]
    assert usual.num_attention_layers == 1
    named = Qwen3Next.read_config(config(layer_types=["full_attention"] * 4))
    assert layers_with_states(named) == []
    assert not named.is_plain, "its attention has a gate"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types must name"),
        ({"layer_types": ["full_attention"]}, "for each of 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer with full_attention"),
        ({"linear_num_value_heads": 3}, "3 value heads for 2 key heads"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        Qwen3Next.read_config(config(**changes))


def test_missing_and_misshapen_tensors_are_named() -> None:
    reference = tiny_models.build("qwen3-next")
    tensors = {name: tensor.detach() for name, tensor in reference.state_dict().items()}

    def load(**changes: torch.Tensor | None) -> None:
        own = {**tensors, **{f"model.layers.{k.replace('__', '.')}": v for k, v in changes.items()}}
        model = Qwen3Next(Qwen3Next.read_config(config()), 16)
        load_weights(model, [(name, tensor) for name, tensor in own.items() if tensor is not None])

    load()
    with pytest.raises(ModelError, match=r"lacks 1 tensors, among them 'model.layers.1.linear_attn.A_log'"):
        load(**{"1__linear_attn__A_log": None})
    with pytest.raises(ModelError, match=r"in_proj_qkvz.weight' has shape .* the config says 128 rows"):
        load(**{"0__linear_attn__in_proj_qkvz__weight": torch.zeros(100, 48)})
    with pytest.raises(ModelError, match=r"q_proj.weight' has 48 rows, the config says 96"):
        load(**{"3__self_attn__q_proj__weight": torch.zeros(48, 48)})


def test_no_call_for_plain_layers_is_taken(tmp_path: Path) -> None:
    """A dense model in float32: without its states and gates the C kernels would run all of its layers at once."""
    tiny_models.save(tiny_models.build("qwen3.5"), tmp_path)
    model = build_engine(EngineOptions(model=str(tmp_path), dtype="float32")).core.runner.program.model
    assert isinstance(model, Qwen3Next)
    assert (model.stack, model._fused) == (None, None)


def test_nothing_stands_between_a_product_and_the_kernels_that_start_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The convolution reads positions of requests before its predecessor has ended, which must be the projection."""
    tiny_models.save(tiny_models.build("qwen3-next"), tmp_path)
    engine = build_engine(EngineOptions(model=str(tmp_path), dtype="float32"))
    said: list[str] = []

    def told(owner: Any, name: str) -> None:
        right = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (said.append(name), right(*args))[1])

    told(GDNBackend, "build")
    told(delta_net.Linear, "forward")
    told(gdn, "causal_conv")
    all_logits(engine, [1, 2, 3])
    assert said[:3] == ["build", "forward", "causal_conv"]
    assert said.count("build") == 1, "once a step"


@torch.inference_mode()
def test_the_mtp_layer_is_a_decoder_layer_behind_two_norms_and_a_product(tmp_path: Path) -> None:
    target, mtp = tiny_models.build("qwen3-next"), random_mtp()
    mtp.write(tiny_models.save(target, tmp_path))
    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    engine = build_engine(EngineOptions(model=str(tmp_path), dtype="float32", speculative_config=speculative))
    head = engine.core.runner.speculator._head  # type: ignore[attr-defined]
    assert not head.fused, "no kernel for plain layers knows of its gate"
    ids = torch.randint(0, 256, (18,), generator=torch.Generator().manual_seed(2))
    hidden = target.model(ids[None, :-1]).last_hidden_state[0]
    expected = mtp.states(target.get_input_embeddings()(ids[1:]), hidden)
    run = Run(head, None)  # type: ignore[arg-type]
    found = []
    for first, end in ((0, 10), (10, 17)):  # in two chunks
        context = run.context([0], [first], [end - first])
        found.append(head.forward(0, ids[1:][first:end].int(), hidden[first:end], context))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.compute_logits(found[0]), target.lm_head(expected[:10]), rtol=1e-4, atol=1e-4)


def test_the_shape_for_benchmarks_has_the_published_layers() -> None:
    config = Qwen3Next.read_config(shape_config("qwen3-next-16l-64e"))
    net = config.cache_specs[0]
    assert isinstance(net, DeltaNetSpec)
    assert len(layers_with_states(config)) == 12 and 3 not in layers_with_states(config)
    assert (net.num_k_heads, net.num_v_heads, net.k_dim, net.v_dim, net.conv_width) == (16, 32, 128, 128, 4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 2, 256)
    size = measure_model(Qwen3Next, config, Placement(torch.device("cuda"), torch.bfloat16))
    assert 4e9 < size.num_params < 5e9
    assert 2 * size.num_params < size.num_bytes < 2.001 * size.num_params, "exponents of delta nets are float32"
    with pytest.raises(ConfigError, match="depends on the experts"):
        weight_bytes("qwen3-next-16l-64e")
