"""Models whose weights stay in the blocks of a GGUF file: the network that dequantising the file gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.errors import ConfigError
from slipstream.kernels import native
from slipstream.models.load import Placement, measure_model, open_decoder
from slipstream.models.registry import architecture_of
from slipstream.weights.quantised import QuantisedMatrix
from tests.checkpoints.tiny_gguf import random_state, sentencepiece_tokenizer, write_model
from tests.engine.drive import make_request, run

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C kernels here")

PROMPTS = [[7, 9, 7, 9, 7, 9], list(range(3, 38)), [5] * 19, [20, 3, 20, 3, 20], [11]]
VOCAB = 278
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def quantised_model(path: Path, arch: str, tied: bool = False, **changed: Q | None) -> Path:
    """Every encoding that a matrix of 64 inputs can have, mixed within the products too."""
    state = random_state(arch, VOCAB, tied=tied)
    state = {name: tensor if "norm" in name else 0.2 * tensor for name, tensor in state.items()}
    kinds = {"q_proj": Q.Q4_0, "k_proj": Q.Q8_0, "v_proj": Q.Q5_1, "o_proj": Q.Q5_0, "lm_head": Q.Q8_0}
    kinds |= {"gate_proj": Q.Q4_1, "up_proj": Q.Q5_0, "down_proj": Q.Q4_1, "embed_tokens": Q.Q8_0}
    wanted = {**kinds, **changed}
    quantise = {
        name: kind
        for name in state
        if name.endswith(".weight") and (kind := wanted.get(name.split(".")[-2])) is not None
    }
    return write_model(path, arch, state, quantise=quantise, tokenizer=sentencepiece_tokenizer())


def build(path: Path, **options: Any) -> Engine:
    given = {"model": str(path), "device": "cpu", "max_model_len": 128, "max_num_seqs": 3, **options}
    return build_engine(EngineOptions.from_dict(given))


def generate(engine: Engine, temperature: float = 0.0) -> list[list[int]]:
    requests = [make_request(f"r{i}", prompt, 20, temperature=temperature, seed=i) for i, prompt in enumerate(PROMPTS)]
    outcomes = run(engine.core, requests)
    return [outcomes[f"r{i}"].token_ids for i in range(len(PROMPTS))]


def blocks_of(engine: Engine) -> list[QuantisedMatrix]:
    model = engine.core.runner.program.model
    assert isinstance(model, torch.nn.Module)
    return [module for module in model.modules() if isinstance(module, QuantisedMatrix)]


@pytest.mark.parametrize(("arch", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", True)])
def test_the_dequantised_networks_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, tied: bool
) -> None:
    """In float64, where the file is dequantised by the ``gguf`` package; with 24 bits, the accuracy of float32.

    With 16 bits the qwen2 network decides one token otherwise, whose log probability leads by 0.00015.
    """
    monkeypatch.setenv("SLIPSTREAM_CPU_ACTIVATION_BITS", "24")
    path = quantised_model(tmp_path / "m.gguf", arch, tied)
    expected = generate(build(path, dtype="float64"))
    engine = build(path, weight_format="stored")
    assert len(blocks_of(engine)) == 2 * 4 + (1 if tied else 2)
    assert generate(engine) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "a stuck model would prove little"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_depends_on_its_request_alone(tmp_path: Path, temperature: float) -> None:
    """To the bit: a product's sums do not depend on the tokens beside it."""
    path = quantised_model(tmp_path / "m.gguf", "llama")
    expected = generate(build(path, max_num_seqs=1), temperature)
    for options in (
        {"max_num_seqs": 5},
        {"max_num_seqs": 5, "speculative_config": NGRAM},
        {"max_num_batched_tokens": 8, "max_num_seqs": 2},
        {"speculative_config": {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}},
    ):
        engine = build(path, **options)
        assert generate(engine, temperature) == expected, options
        if "speculative_config" in options:
            assert engine.core.stats.num_draft_tokens > 0
            assert engine.core.stats.num_accepted_tokens > 0 or temperature > 0


def test_a_product_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    path = quantised_model(tmp_path / "m.gguf", "llama", v_proj=None)
    engine = build(path)
    assert len(blocks_of(engine)) == 2 * 3 + 2, "all but the projections to queries, keys and values"
    assert generate(engine) == generate(build(path, dtype="float64"))


@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_planned_as_it_is_built(tmp_path: Path, tied: bool) -> None:
    """A table that is the output matrix as well is in memory once."""
    path = quantised_model(tmp_path / "m.gguf", "llama", tied)
    model = build(path).core.runner.program.model
    assert isinstance(model, torch.nn.Module)
    checkpoint = open_decoder(path, keep_blocks=True)
    architecture = architecture_of(checkpoint.config)
    placement = Placement(torch.device("cpu"), torch.float32)
    size = measure_model(architecture, architecture.read_config(checkpoint.config), placement)
    assert size.num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    state = random_state("llama", VOCAB, tied=tied)
    assert size.num_params == sum(tensor.numel() for tensor in state.values())
    assert size.num_bytes < 1.6 * size.num_params, "five to nine bits each, and padding of small matrices"


def test_every_table_and_matrix_dequantises_to_the_file(tmp_path: Path) -> None:
    path = quantised_model(tmp_path / "m.gguf", "qwen2")
    expected = dict(open_decoder(path).tensors())
    model = build(path).core.runner.program.model
    embedding = model.model.embed_tokens.matrix  # type: ignore[attr-defined]
    assert torch.equal(embedding.dequantised(), expected["model.embed_tokens.weight"])
    ids = torch.tensor([3, 0, VOCAB - 1], dtype=torch.int32)
    assert torch.equal(embedding.look_up(ids), expected["model.embed_tokens.weight"][ids.long()])
    for idx, layer in enumerate(model.model.layers):  # type: ignore[attr-defined]
        prefix = f"model.layers.{idx}."
        for linear, place in (
            (layer.self_attn.qkv_proj, "self_attn"),
            (layer.self_attn.o_proj, "self_attn"),
            (layer.mlp.gate_up_proj, "mlp"),
            (layer.mlp.down_proj, "mlp"),
        ):
            parts = [expected[f"{prefix}{place}.{part}.weight"] for part in linear.shape.parts]
            assert torch.equal(linear.matrix.dequantised(), torch.cat(parts))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_format": "store"}, "must be one of auto, stored, float, not 'store'; did you mean 'stored'"),
        ({"weight_format": "stored", "dtype": "float64"}, "stored needs device cpu, dtype float32 and a C compiler"),
        ({"weight_format": "stored", "device": "sim"}, "stored needs device cpu"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = quantised_model(tmp_path / "m.gguf", "llama")
    with pytest.raises(ConfigError, match=message):
        build(path, **options)


def test_without_a_compiler_weights_are_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = quantised_model(tmp_path / "m.gguf", "llama")
    expected = generate(build(path, dtype="float64"))
    monkeypatch.setattr(native, "library", lambda: None)
    engine = build(path)
    assert not blocks_of(engine)
    assert generate(engine) == expected


def test_the_kinds_of_weights_are_named(tmp_path: Path) -> None:
    path = quantised_model(tmp_path / "m.gguf", "llama")
    assert build(path).config.weight_formats == "Q5_0, Q8_0, Q4_1, Q4_0, Q5_1"
    assert build(path, weight_format="float").config.weight_formats == "float32"
    assert build(path, dtype="float64").config.weight_formats == "float64"
