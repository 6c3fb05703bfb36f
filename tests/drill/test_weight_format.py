"""A new format of weights is one file, registered by the name that a checkpoint gives it: see ``toy_weights``.

The engine generates with it what the dequantised network gives without any engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine, plan_engine
from slipstream.errors import ModelError
from slipstream.models.load import Placement, measure_model, open_decoder
from slipstream.weights import registry
from tests import tiny_models
from tests.drill.test_cache_kinds import DRAFTS, LENGTH, PROMPTS, SIM
from tests.drill.toy_model import Twin
from tests.drill.toy_weights import METHOD, Int8Rows, quantise
from tests.engine.drive import make_request, run

IGNORED = ("lm_head", "model.layers.1.mlp.down_proj")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "registered", {})
    registry.register(METHOD, Int8Rows)


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight") and name.removesuffix(".weight") not in IGNORED


def write_model(folder: Path, kind: str = "llama") -> list[list[int]]:
    """A quantised checkpoint; what its dequantised twin generates."""
    tiny_models.save(tiny_models.build(kind), folder)
    stored, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = tensor
        dense[name] = tensor.double()
        if is_quantised(name):
            codes, scales = quantise(tensor)
            stored |= {name: codes, f"{name}_scale": scales}
            dense[name] = codes.double() * scales.double()
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD, "ignore": list(IGNORED)}
    twin_config = {**config, "toy_layers": ["attention"] * config["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps(twin_config))
    twin = Twin(folder, dense)
    return [twin.generate(prompt, LENGTH) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[list[int]]]]:
    folder = tmp_path_factory.mktemp("int8")
    yield folder, write_model(folder)


def build(folder: Path, **options: Any) -> Engine:
    given = {"model": str(folder), "dtype": "float64", "max_model_len": 128, "max_num_seqs": 3, **options}
    return build_engine(EngineOptions.from_dict(given))


@pytest.mark.parametrize(
    "options",
    [{}, DRAFTS, {**SIM, "cudagraph_mode": "full", **DRAFTS}, {**SIM, "cudagraph_mode": "piecewise"}],
    ids=str,
)
def test_the_dequantised_twins_tokens(written: tuple[Path, list[list[int]]], options: dict[str, Any]) -> None:
    folder, expected = written
    engine = build(folder, **options)
    requests = [make_request(f"r{i}", prompt, LENGTH) for i, prompt in enumerate(PROMPTS)]
    outcomes = run(engine.core, requests)
    assert [outcomes[f"r{i}"].token_ids for i in range(len(PROMPTS))] == expected
    engine.core.scheduler.check_idle()


def test_a_model_of_such_weights_drafts_for_itself(written: tuple[Path, list[list[int]]]) -> None:
    folder, expected = written
    draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    engine = build(folder, speculative_config=draft)
    outcomes = run(engine.core, [make_request("r", PROMPTS[0], LENGTH)])
    assert outcomes["r"].token_ids == expected[0]
    assert engine.core.stats.num_accepted_tokens == engine.core.stats.num_draft_tokens > 0


def test_memory_is_planned_as_it_is_built(written: tuple[Path, list[list[int]]]) -> None:
    """Eight bits a number and eight bytes a row, in float64: counted before anything is allocated."""
    folder, _ = written
    stored = load_file(folder / "model.safetensors")
    bytes_of = {name: tensor.numel() * (1 if tensor.dtype == torch.int8 else 8) for name, tensor in stored.items()}
    options = EngineOptions(model=str(folder), dtype="float64")
    plan = plan_engine(options, open_decoder(folder).config)
    model = build(folder).core.runner.program.model
    assert sum(parameter.nbytes for parameter in model.parameters()) == sum(bytes_of.values())
    placement = Placement(plan.device.torch_device, torch.float64)
    size = measure_model(plan.architecture, plan.config.model, placement)
    num_params = sum(tensor.numel() for name, tensor in stored.items() if not name.endswith("_scale"))
    assert (size.num_params, size.num_bytes) == (num_params, sum(bytes_of.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "toy_int9"}, "'toy_int9' are not supported; did you mean 'toy_int8'"),
        ({"quant_method": None}, "None are not supported"),
        ({"ignore": []}, r"lm_head.weight' holds torch\.float32, the config says torch\.int8"),
        ({"ignore": [*IGNORED, "model.layers.0.mlp.down_proj"]}, r"down_proj.weight_scale' does not belong"),
    ],
)
def test_what_does_not_fit_is_one_line(
    written: tuple[Path, list[list[int]]], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder, _ = written
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        build(tmp_path)


def test_experts_are_refused_where_the_format_has_none(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.build("qwen3-moe"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="experts with weights of the kind toy_int8 are not supported"):
        build(tmp_path)


def test_the_package_knows_none_of_this() -> None:
    for path in Path(registry.__file__).parent.parent.rglob("*.py"):
        assert METHOD not in path.read_text() and "Int8" not in path.read_text(), path
