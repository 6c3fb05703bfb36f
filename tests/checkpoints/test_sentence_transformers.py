from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.checkpoints.sentence_transformers import read_dense_steps, read_pooling, read_text_limit
from slipstream.errors import ModelError, RequestError
from slipstream.pooling import PoolingDefaults

# As the published Qwen3-Embedding-0.6B has them.
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
POOLING = {
    "word_embedding_dimension": 1024,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def write(folder: Path, modules: Any = MODULES, pooling: Any = POOLING) -> Path:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_without_files_it_is_the_last_token(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == PoolingDefaults("last", True, "")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "last"),
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "max"}, "max"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_lasttoken": False, "pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ({"pooling_mode_lasttoken": False, "pooling_mode_weightedmean_tokens": True}, "weighted_mean"),
    ],
    ids=str,
)
def test_published_files(tmp_path: Path, changes: dict[str, Any], kind: str) -> None:
    assert read_pooling(write(tmp_path, pooling={**POOLING, **changes})) == PoolingDefaults(kind, True, is_stated=True)
    unnormalised = read_pooling(write(tmp_path, MODULES[:2], {**POOLING, **changes}))
    assert unnormalised == PoolingDefaults(kind, False, is_stated=True)
    newer = [
        {**module, "type": f"sentence_transformers.base.modules.x.{module['type'].rpartition('.')[2]}"}
        for module in MODULES
    ]
    assert read_pooling(write(tmp_path, newer, {**POOLING, **changes})) == PoolingDefaults(kind, True, is_stated=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pooling_mode_mean_tokens": True}, "'lasttoken' and 'mean_tokens'"),
        ({"pooling_mode_lasttoken": False}, "none"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": False, "pooling_mode_max_tokens": True},
            "'cls_token' and 'max_tokens'",
        ),
        ({"pooling_mode": "most"}, "'most'"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_said(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    found = read_pooling(write(tmp_path, pooling={**POOLING, **changes}))
    assert found.refusal == f"{tmp_path}/1_Pooling/config.json asks for pooling {named}, which is not supported"


def test_another_module_is_said(tmp_path: Path) -> None:
    other = {"idx": 2, "name": "2", "path": "2_LSTM", "type": "sentence_transformers.models.LSTM"}
    found = read_pooling(write(tmp_path, [*MODULES[:2], other, MODULES[2]]))
    assert found.refusal == f"{tmp_path}/modules.json has a module 'LSTM', which is not supported"


def test_a_dense_layer(tmp_path: Path) -> None:
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (tmp_path / "2_Dense").mkdir()
    config = {
        "in_features": 4,
        "out_features": 3,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(config))
    weights = {"linear.weight": torch.randn(3, 4), "linear.bias": torch.randn(3)}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    found = read_pooling(write(tmp_path, [*MODULES[:2], dense, MODULES[2]]))
    assert (found.size, found.normalize, found.refusal) == (3, True, "")
    ((weight, bias, activation),) = read_dense_steps(tmp_path)
    assert bias is not None and activation == "tanh"
    assert torch.equal(weight, weights["linear.weight"]) and torch.equal(bias, weights["linear.bias"])
    # After normalisation it would be another vector.
    late = read_pooling(write(tmp_path, [*MODULES, {**dense, "idx": 3}]))
    assert late.refusal == f"{tmp_path}/modules.json has a module 'Dense', which is not supported"
    config["activation_function"] = "torch.nn.modules.activation.Softplus"
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has activation 'Softplus', which is not supported"):
        read_dense_steps(tmp_path)


def test_prompts_and_limits(tmp_path: Path) -> None:
    content = {"prompts": {"query": "search: ", "document": ""}, "default_prompt_name": "document"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": false}')
    found = read_pooling(write(tmp_path))
    assert [found.prompt_of(name) for name in (None, "query", "document")] == ["", "search: ", ""]
    with pytest.raises(RequestError, match=r"no prompt 'querry'; did you mean 'query'\? \(known: query, document\)"):
        found.prompt_of("querry")
    assert read_text_limit(tmp_path) == 256
    with pytest.raises(RequestError, match="the checkpoint has none"):
        PoolingDefaults().prompt_of("query")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({}, "must hold a list of modules"),
        ([3], "must hold a list of modules"),
        ([{"path": ""}], "has no valid 'type'"),
        ([{**MODULES[1], "path": 3}], "has no valid 'path': 3 is not a text"),
        ([{**MODULES[1], "path": "../other"}], "names the folder '../other', which is outside of the checkpoint"),
        ([{**MODULES[1], "path": "/etc"}], "names the folder '/etc', which is outside of the checkpoint"),
        ([{**MODULES[1], "path": "nowhere"}], "cannot be read"),
    ],
    ids=str,
)
def test_damaged_files_are_one_line(tmp_path: Path, modules: Any, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_pooling(write(tmp_path, modules))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_no_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="not valid JSON"):
        read_pooling(tmp_path)
    write(tmp_path, pooling={**POOLING, "pooling_mode_lasttoken": "yes"})
    with pytest.raises(ModelError, match="'pooling_mode_lasttoken': 'yes' is not true or false"):
        read_pooling(tmp_path)
