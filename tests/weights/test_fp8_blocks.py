"""Weights of eight-bit floats with a scale for each block, against the definition in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.errors import ModelError
from slipstream.models.load import Placement, measure_model, open_decoder
from slipstream.models.registry import architecture_of
from slipstream.weights import fp8_blocks
from slipstream.weights.dense import Dense, DenseExperts
from slipstream.weights.fp8_blocks import BlocksExperts, BlocksFormat, BlocksWeight, FP8Scheme
from slipstream.weights.matrix import ExpertShape, PackingSlot, WeightShape
from slipstream.weights.registry import scheme_of
from tests import tiny_models
from tests.engine.drive import make_request, run

CPU = torch.device("cpu")
PUBLISHED: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# Blocks that divide neither side of a tiny model's weights.
SMALL = {**PUBLISHED, "weight_block_size": [20, 32]}
PROMPTS = [[7, 9, 7, 9, 7, 9], list(range(3, 38)), [11]]


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes and scales, one block after another."""
    rows, columns = block
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i, j in torch.cartesian_prod(*(torch.arange(n) for n in scales.shape)).tolist():
        own = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
        scales[i, j] = weight[own].abs().max() / 448
        codes[own] = (weight[own] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def meant(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = codes.shape
    spread = scales.double().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return codes.double() * spread


def fill(slots: Mapping[str, PackingSlot], name: str, tensor: Tensor) -> None:
    slot = slots[name]
    assert slot.expected.is_meta
    assert (slot.expected.shape, slot.expected.dtype) == (tensor.shape, tensor.dtype)
    slot.fill(tensor)


@pytest.mark.parametrize("scales_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_rows", [128, 256, 1 << 20])
def test_a_stacked_weight(
    monkeypatch: pytest.MonkeyPatch, most_rows: int, dtype: torch.dtype, scales_first: bool
) -> None:
    """576 rows are five blocks, the last of 64; the second part has blocks of its own."""
    monkeypatch.setattr(fp8_blocks, "_MOST_ROWS", most_rows)
    parts, expected = {"kv_a_proj_with_mqa": 576, "other": 130}, []
    torch.set_default_dtype(dtype)
    try:
        stored = FP8Scheme(PUBLISHED).format_of(["a.kv_a_proj_with_mqa", "a.other"]).open(WeightShape(300, parts))
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(stored, BlocksWeight)
    slots = dict(stored.slots("a."))
    assert len(slots) == 4
    for part, rows in parts.items():
        codes, scales = quantise(torch.randn(rows, 300) * torch.rand(rows, 1), (128, 128))
        assert scales.shape == (-(-rows // 128), 3)
        tensors = [(f"a.{part}.weight", codes), (f"a.{part}.weight_scale_inv", scales)]
        for name, tensor in reversed(tensors) if scales_first else tensors:
            fill(slots, name, tensor)
        expected.append(meant(codes, scales, (128, 128)))
    matrix = stored.finish(CPU)
    weight = torch.cat(expected)
    assert matrix.dequantised().dtype == dtype
    assert torch.equal(matrix.dequantised(), (weight if dtype == torch.float64 else weight.float()).to(dtype))
    x = torch.randn(3, 300)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        matrix.project(x.to(dtype), None).double(), x.double() @ weight.T, rtol=tolerance, atol=tolerance
    )


def test_experts() -> None:
    shape, block = ExpertShape(3, 40, 24), (16, 16)
    stored = FP8Scheme({**PUBLISHED, "weight_block_size": list(block)}).format_of(["mlp.experts"]).open_experts(shape)
    assert isinstance(stored, BlocksExperts)
    slots = dict(stored.slots("mlp.experts."))
    assert len(slots) == 3 * 3 * 2
    expected = {}
    for idx in range(3):
        for kind, size in (("gate_proj", (24, 40)), ("up_proj", (24, 40)), ("down_proj", (40, 24))):
            codes, scales = quantise(torch.randn(size), block)
            name = f"mlp.experts.{idx}.{kind}.weight"
            fill(slots, name, codes)
            fill(slots, f"{name}_scale_inv", scales)
            expected[idx, kind] = meant(codes, scales, block).float()
    found = stored.finish(CPU)
    assert isinstance(found, DenseExperts)
    for idx in range(3):
        both = torch.cat([expected[idx, "gate_proj"], expected[idx, "up_proj"]])
        assert torch.equal(found.gate_up[idx], both)
        assert torch.equal(found.down[idx], expected[idx, "down_proj"])


def test_what_is_plain_by_its_name() -> None:
    listed = {
        "modules_to_not_convert": ["model.layers.1", "q_a_proj"],
        "ignored_layers": ["model.layers.2.mlp.up_proj"],
    }
    scheme = scheme_of({**PUBLISHED, **listed, "scale_fmt": "ue8m0"})
    layer = "model.layers.0"
    for plain in ("lm_head", f"{layer}.mlp.gate", "model.layers.1.mlp.down_proj", "layers.0.eh_proj"):
        assert isinstance(scheme.format_of([plain]), Dense)
    assert isinstance(scheme.format_of([f"{layer}.self_attn.q_a_proj"]), Dense)
    assert isinstance(scheme.format_of_table("model.embed_tokens"), Dense)
    assert isinstance(scheme.format_of(["model.layers.1.mlp.experts"]), Dense)
    stacked = [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"]
    shared = f"{layer}.mlp.shared_experts.down_proj"
    for quantised in (stacked, [shared], [f"{layer}.mlp.experts"], ["model.layers.10.mlp.down_proj"]):
        assert isinstance(scheme.format_of(quantised), BlocksFormat)
    with pytest.raises(ModelError, match=r"leaves out a part of model\.layers\.2\.mlp\.gate_proj"):
        scheme.format_of(["model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj"])


def is_quantised(name: str) -> bool:
    return not any(word in name for word in ("embed_tokens", "norm", "lm_head", ".gate.weight"))


def write(folder: Path, variant: str) -> dict[str, Tensor]:
    """A checkpoint in blocks; its weights by the names of a plain one."""
    tiny_models.save(tiny_models.build(variant), folder)
    stored, dense = {}, {}
    rows, columns = SMALL["weight_block_size"]
    for name, tensor in load_file(folder / "model.safetensors").items():
        if is_quantised(name):
            codes, scales = quantise(tensor, (rows, columns))
            stored |= {name: codes, f"{name}_scale_inv": scales}
            dense[name] = meant(codes, scales, (rows, columns)).float()
        else:
            stored[name] = dense[name] = tensor
    save_file(stored, folder / "model.safetensors")
    configure(folder, SMALL)
    return dense


def configure(folder: Path, quantization: dict[str, Any] | None) -> None:
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "quantization_config": quantization}))


def write_plain(folder: Path, source: Path, dense: dict[str, Tensor]) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    configure(folder, None)
    save_file(dense, folder / "model.safetensors")
    return folder


def build(folder: Path, dtype: str = "float32") -> Engine:
    return build_engine(EngineOptions(model=str(folder), max_model_len=128, max_num_seqs=3, dtype=dtype))


def generate(engine: Engine) -> list[list[int]]:
    outcomes = run(engine.core, [make_request(f"r{i}", prompt, 20) for i, prompt in enumerate(PROMPTS)])
    return [outcomes[f"r{i}"].token_ids for i in range(len(PROMPTS))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["llama", "mixtral", "qwen3-moe"])
def test_the_tokens_of_the_dequantised_checkpoint(tmp_path: Path, variant: str, dtype: str) -> None:
    dense = write(tmp_path / "blocks", variant)
    plain = write_plain(tmp_path / "plain", tmp_path / "blocks", dense)
    engine, twin = build(tmp_path / "blocks", dtype), build(plain, dtype)
    assert generate(engine) == generate(twin)
    pair = (each.core.runner.program.model for each in (engine, twin))
    found, expected = (dict(model.named_parameters()) for model in pair)  # type: ignore[attr-defined]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("variant", ["llama", "qwen3-moe"])
def test_memory_is_planned_as_it_is_built(tmp_path: Path, variant: str, dtype: str) -> None:
    dense = write(tmp_path, variant)
    model = build(tmp_path, dtype).core.runner.program.model
    config = open_decoder(tmp_path).config
    architecture = architecture_of(config)
    size = measure_model(architecture, architecture.read_config(config), Placement(CPU, getattr(torch, dtype)))
    assert size.num_bytes == sum(parameter.nbytes for parameter in model.parameters())  # type: ignore[attr-defined]
    assert size.num_params == sum(tensor.numel() for tensor in dense.values())
    assert size.formats == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "e5m2"}, "fp8 with fmt 'e5m2' is not supported"),
        ({"activation_scheme": "static"}, "fp8 with activation_scheme 'static' is not supported"),
        ({"scale_fmt": "e8m0"}, "fp8 with scale_fmt 'e8m0' is not supported"),
        ({"weight_block_size": None}, "fp8 with weight_block_size None is not supported"),
        ({"weight_block_size": [128]}, r"fp8 with weight_block_size \[128\] is not supported"),
        ({"weight_block_size": [128, 0]}, r"fp8 with weight_block_size \[128, 0\] is not supported"),
        ({"modules_to_not_convert": "lm_head"}, "'modules_to_not_convert' of fp8 must be a list of names"),
        ({"ignored_layers": [1]}, "'ignored_layers' of fp8 must be a list of names"),
        ({"weight_block_size": [16, 32]}, r"weight_scale_inv' has shape .*, the config says"),
        ({"modules_to_not_convert": ["down_proj"]}, "down_proj.weight_scale_inv' does not belong"),
    ],
)
def test_what_is_not_supported_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write(tmp_path, "llama")
    configure(tmp_path, {**SMALL, **change})
    with pytest.raises(ModelError, match=message) as found:
        build(tmp_path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("variant", ["llama", "mixtral"])
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, variant: str) -> None:
    write(tmp_path, variant)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(
        name for name in tensors if name.endswith("_scale_inv") and ("experts" in name) is (variant == "mixtral")
    )
    scale, codes = tensors.pop(name), tensors[name.removesuffix("_scale_inv")]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 1 tensors, among them '.*weight_scale_inv'"):
        build(tmp_path)
    changed = {**tensors, name: scale, name.removesuffix("_scale_inv"): codes.to(torch.bfloat16)}
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds torch.bfloat16, the config says torch.float8_e4m3fn"):
        build(tmp_path)
    save_file({n: t for n, t in tensors.items() if not n.endswith("_scale_inv")}, tmp_path / "model.safetensors")
    configure(tmp_path, None)
    with pytest.raises(ModelError, match=r"holds torch.float8_e4m3fn, the config says torch.float32"):
        build(tmp_path)
