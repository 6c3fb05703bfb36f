"""A draft head that does not fit, at the command line: one line that names the tensor or the key, and exit code 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands.run_cli import Outcome, RunCli, assert_one_line_error
from tests.models.heads.tiny_heads import TAPS, Case, eagle, eagle3

LONG = {"max_position_embeddings": 512}


def right_head(**config: Any) -> Case:
    """For the tiny model, which has few layers: the taps have to be said."""
    return eagle3({TAPS: [0, 1, 2], **config}, body=LONG)


def with_tensor(name: str, value: torch.Tensor | None, case: Case) -> Case:
    if value is None:
        del case.tensors[name]
    else:
        case.tensors[name] = value
    return case


@pytest.fixture
def generate(cli: RunCli, tiny_model: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Write a head, and generate with it."""

    def run(case: Case, damage: Callable[[Path], object] = lambda _folder: None) -> Outcome:
        folder = tmp_path / "head"
        folder.mkdir()
        damage(case.write(folder))
        config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
        arguments = ("--model", tiny_model, "--max-tokens", 3, "--speculative-config", json.dumps(config))
        return cli("generate", "x", *arguments)

    return run


BAD: dict[str, tuple[Callable[[], Case], tuple[str, ...]]] = {
    "hidden size": (lambda: right_head(hidden_size=64), ("'hidden_size' 64, the target has 48",)),
    "target's hidden size": (lambda: right_head(target_hidden_size=64), ("'target_hidden_size' 64",)),
    "weights of another hidden size": (
        lambda: with_tensor("midlayer.hidden_norm.weight", torch.ones(64), right_head()),
        ("'midlayer.hidden_norm.weight' has shape [64], the config says [48]",),
    ),
    "missing tensor": (
        lambda: with_tensor("midlayer.self_attn.o_proj.weight", None, right_head()),
        ("lacks 1 tensors", "'layers.0.self_attn.o_proj.weight'"),
    ),
    "missing vocabulary": (lambda: with_tensor("d2t", None, right_head()), ("lacks the tensor 'd2t'",)),
    "number of taps in the config": (
        lambda: right_head(num_aux_hidden_states=4),
        ("'num_aux_hidden_states' 4", f"'{TAPS}' means 3 layers"),
    ),
    "number of taps in the weights": (
        lambda: with_tensor("fc.weight", torch.zeros(48, 96), right_head()),
        ("'fc.weight' has shape [48, 96], the config says [48, 144]", f"3 taps ('{TAPS}')"),
    ),
    "taps after the last layer": (lambda: right_head(**{TAPS: [0, 1, 9]}), (f"'{TAPS}'", "after 9 layers")),
    "unknown variant": (lambda: right_head(norm_after_fc=True), ("'norm_after_fc'", "a variant that is not known")),
    "misspelt variant": (lambda: right_head(norm_outputs=True), ("'norm_outputs'", "did you mean 'norm_output'?")),
    "variant inside": (
        lambda: right_head(eagle_config={"parallel_draft_step": 4}),
        ("'eagle_config.parallel_draft_step'", "is 4; only 1 is supported"),
    ),
}


@pytest.mark.parametrize(("make", "messages"), BAD.values(), ids=list(BAD))
def test_a_head_that_does_not_fit(
    generate: Callable[..., Outcome], make: Callable[[], Case], messages: tuple[str, ...]
) -> None:
    assert_one_line_error(generate(make()), *messages)


def test_the_head_they_were_made_from_fits(generate: Callable[..., Outcome]) -> None:
    outcome = generate(right_head())
    assert outcome.code == 0, outcome.err


def test_a_head_of_another_method(generate: Callable[..., Outcome]) -> None:
    outcome = generate(eagle(LONG))
    assert_one_line_error(outcome, "'LlamaForCausalLMEagle' is that of a head for the method eagle, not for eagle3")


def test_a_file_that_is_no_pickle(generate: Callable[..., Outcome], tmp_path: Path) -> None:
    case = right_head()
    case.bin = True
    file = tmp_path / "head" / "pytorch_model.bin"
    assert_one_line_error(generate(case, lambda _: file.write_text("<html>")), str(file), "cannot be read")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "config.json has neither 'num_nextn_predict_layers' nor 'mtp_num_hidden_layers'"),
        ({"num_nextn_predict_layers": 0}, "config.json says 'num_nextn_predict_layers' 0"),
        ({"num_nextn_predict_layers": 1}, ".enorm.weight'"),
    ],
)
def test_a_target_without_mtp_layers(
    cli: RunCli, tiny_model: Path, tmp_path: Path, config: dict[str, int], line: str
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "target"))
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    arguments = ("--model", folder, "--speculative-config", json.dumps({"method": "mtp"}))
    assert_one_line_error(cli("generate", "x", *arguments), line)


def test_mtp_layers_of_another_hidden_size(cli: RunCli, tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "target"))
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), "num_nextn_predict_layers": 1}
    file.write_text(json.dumps(config))
    name = f"model.layers.{config['num_hidden_layers']}.enorm.weight"
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), name: torch.ones(64)}, weights)
    arguments = ("--model", folder, "--speculative-config", json.dumps({"method": "mtp"}))
    assert_one_line_error(cli("generate", "x", *arguments), f"'{name}' has shape [64], the config says [48]")
