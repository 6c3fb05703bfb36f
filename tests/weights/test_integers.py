"""Integer formats of checkpoints, against weights that were packed bit by bit from the formats' descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.errors import ModelError
from slipstream.kernels import native
from slipstream.models.load import Placement, measure_model, open_decoder
from slipstream.models.registry import architecture_of
from slipstream.weights.quantised import QuantisedMatrix
from tests import tiny_models
from tests.engine.drive import make_request, run

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PROMPTS = [[7, 9, 7, 9, 7, 9], list(range(3, 38)), [11]]
GROUP = 32
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def pack_bits(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Along the last axis: number by number, code by code."""
    per = 32 // bits
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // per), dtype=np.uint64)
    for j in range(out.shape[-1]):
        for i in range(per):
            column = per * j + (i if order is None else order[i])
            out[..., j] |= codes[..., column].astype(np.uint64) << np.uint64(bits * i)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


class Packed:
    """One weight in a format: its tensors, and the numbers that they mean."""

    def __init__(self, tensors: dict[str, Tensor], weight: np.ndarray) -> None:
        self.tensors, self.weight = tensors, torch.from_numpy(weight)


def draw(rng: np.random.Generator, shape: tuple[int, int], group: int, bits: int) -> tuple[np.ndarray, ...]:
    """Codes, scales and zeros by group, and the weight."""
    rows, columns = shape
    codes = rng.integers(0, 1 << bits, shape)
    scales = rng.uniform(0.2, 0.6, (rows, columns // group)).astype(np.float16) / (1 << bits)
    zeros = rng.integers(1, (1 << bits) - 1, (rows, columns // group))
    return codes, scales, zeros


def spread(values: np.ndarray, columns: int) -> np.ndarray:
    return np.repeat(values, columns // values.shape[1], axis=1)


def pack_compressed(rng: np.random.Generator, shape: tuple[int, int], bits: int, group: int, even: bool) -> Packed:
    codes, scales, zeros = draw(rng, shape, group, bits)
    if even:
        zeros = np.full_like(zeros, 1 << (bits - 1))
    tensors = {
        "weight_packed": pack_bits(codes, bits),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor(shape),
    }
    if not even:
        tensors["weight_zero_point"] = pack_bits(zeros.T, bits).T.contiguous()
    return Packed(tensors, spread(scales.astype(float), shape[1]) * (codes - spread(zeros, shape[1])))


def pack_int8(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes, scales, _ = draw(rng, shape, shape[1], 8)
    signed = codes - 128
    weight = torch.from_numpy(signed.astype(np.int8))
    return Packed({"weight": weight, "weight_scale": torch.from_numpy(scales)}, scales.astype(float) * signed)


def pack_gptq(rng: np.random.Generator, shape: tuple[int, int], version: int, shuffled: bool) -> Packed:
    codes, scales, zeros = draw(rng, shape, GROUP, 4)
    group_of = np.arange(shape[1]) // GROUP
    if shuffled:
        group_of = rng.permutation(group_of)
    stored = zeros - 1 if version == 1 else zeros
    tensors = {
        "qweight": pack_bits(codes, 4).T.contiguous(),
        "qzeros": pack_bits(stored.T, 4),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return Packed(tensors, scales.astype(float)[:, group_of] * (codes - zeros[:, group_of]))


def pack_awq(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes, scales, zeros = draw(rng, shape, GROUP, 4)
    tensors = {
        "qweight": pack_bits(codes.T.copy(), 4, AWQ_ORDER),
        "qzeros": pack_bits(zeros.T.copy(), 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return Packed(tensors, spread(scales.astype(float), shape[1]) * (codes - spread(zeros, shape[1])))


def compressed(form: str, bits: int, group: int | None, even: bool = True) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": even, **strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    ignore = ["lm_head", "re:.*layers.1.mlp.down.*"]
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ignore}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "int4": (compressed("pack-quantized", 4, GROUP), lambda rng, shape: pack_compressed(rng, shape, 4, GROUP, True)),
    "int4 with zeros": (
        compressed("pack-quantized", 4, GROUP, even=False),
        lambda rng, shape: pack_compressed(rng, shape, 4, GROUP, False),
    ),
    "int8 packed": (
        compressed("pack-quantized", 8, GROUP),
        lambda rng, shape: pack_compressed(rng, shape, 8, GROUP, True),
    ),
    "int8 by row": (compressed("int-quantized", 8, None), pack_int8),
    "gptq": (GPTQ, lambda rng, shape: pack_gptq(rng, shape, 1, False)),
    "gptq of version 2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda rng, shape: pack_gptq(rng, shape, 2, False),
    ),
    "gptq in the order of activations": ({**GPTQ, "desc_act": True}, lambda rng, shape: pack_gptq(rng, shape, 1, True)),
    "awq": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "version": "gemm", "zero_point": True}
        | {"modules_to_not_convert": ["layers.1.mlp.down_proj"]},
        pack_awq,
    ),
}


def is_quantised(name: str, config: dict[str, Any]) -> bool:
    excepted = config["quant_method"] != "gptq" and "layers.1.mlp.down_proj" in name
    return name.endswith("_proj.weight") and not excepted


def write(folder: Path, case: str) -> dict[str, Tensor]:
    """A checkpoint; its weights by the names of a plain one, in float64."""
    config, pack = FORMATS[case]
    tiny_models.save(tiny_models.build("qwen2", **SHAPE), folder)
    rng, stored, dense = np.random.default_rng(3), {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if is_quantised(name, config):
            packed = pack(rng, tuple(tensor.shape))
            dense[name] = packed.weight
            stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in packed.tensors.items()}
        else:
            stored[name], dense[name] = tensor, tensor.double()
    save_file(stored, folder / "model.safetensors")
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "quantization_config": config}))
    return dense


def write_plain(folder: Path, source: Path, dense: dict[str, Tensor]) -> None:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    given = json.loads((folder / "config.json").read_text())
    del given["quantization_config"]
    (folder / "config.json").write_text(json.dumps(given))
    save_file(dense, folder / "model.safetensors")


def build(folder: Path, **options: Any) -> Engine:
    given = {"model": str(folder), "max_model_len": 128, "max_num_seqs": 3, **options}
    return build_engine(EngineOptions.from_dict(given))


def generate(engine: Engine) -> list[list[int]]:
    outcomes = run(engine.core, [make_request(f"r{i}", prompt, 20) for i, prompt in enumerate(PROMPTS)])
    return [outcomes[f"r{i}"].token_ids for i in range(len(PROMPTS))]


@pytest.mark.parametrize("case", FORMATS)
def test_the_numbers_of_the_format(tmp_path: Path, case: str) -> None:
    """Every weight as it was packed; the tokens of the plain checkpoint, quantised in memory and not."""
    dense = write(tmp_path / "quantised", case)
    write_plain(tmp_path / "plain", tmp_path / "quantised", dense)
    expected = generate(build(tmp_path / "plain", dtype="float64"))
    assert generate(build(tmp_path / "quantised", dtype="float64")) == expected
    engine = build(tmp_path / "quantised", dtype="float32")
    assert generate(engine) == expected
    model = engine.core.runner.program.model
    matrices = [module for module in model.modules() if isinstance(module, QuantisedMatrix)]  # type: ignore[attr-defined]
    layers = model.model.layers  # type: ignore[attr-defined]
    if native.library() is not None:
        excepted = 0 if "gptq" in case else 1
        assert len(matrices) == (0 if "order" in case else 4 * len(layers) - excepted)
    for idx, layer in enumerate(layers):
        prefix = f"model.layers.{idx}."
        parts = [dense[f"{prefix}self_attn.{part}.weight"] for part in ("q_proj", "k_proj", "v_proj")]
        found = layer.self_attn.qkv_proj.matrix.dequantised()
        torch.testing.assert_close(found.double(), torch.cat(parts), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", ["int4", "int8 by row", "awq"])
def test_memory_is_planned_as_it_is_built(tmp_path: Path, case: str, dtype: str) -> None:
    write(tmp_path, case)
    model = build(tmp_path, dtype=dtype).core.runner.program.model
    config = open_decoder(tmp_path).config
    architecture = architecture_of(config)
    placement = Placement(torch.device("cpu"), getattr(torch, dtype))
    size = measure_model(architecture, architecture.read_config(config), placement)
    assert size.num_bytes == sum(parameter.nbytes for parameter in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("int4", {"format": "nvfp4-pack-quantized"}, "of the format 'nvfp4-pack-quantized' is not supported"),
        ("int4", {"config_groups": {}}, "config_groups"),
        ("int4", {"ignore": ["lm_head", "model.layers.0.self_attn.k_proj"]}, "ignores a part of"),
        ("int4", {"ignore": "lm_head"}, "'ignore' of compressed-tensors must be a list"),
        ("gptq", {"bits": 3}, "gptq with 3 bits and group_size 32 is not supported"),
        ("gptq", {"group_size": "x"}, "group_size 'x' is not supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("awq", {"version": "gemv"}, "awq of version 'gemv'"),
        ("awq", {"q_group_size": 16}, "has shape .*, the config says"),
        ("awq", {"quant_method": "awk"}, "'awk' are not supported; did you mean 'awq'"),
    ],
)
def test_what_is_not_supported_is_one_line(tmp_path: Path, case: str, change: dict[str, Any], message: str) -> None:
    write(tmp_path, case)
    given = json.loads((tmp_path / "config.json").read_text())
    given["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ModelError, match=message):
        build(tmp_path)
