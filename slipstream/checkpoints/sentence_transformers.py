"""How a checkpoint's vectors are made, as the files of sentence-transformers beside it say.

``modules.json`` lists what hidden states go through, each module with a folder of its own: pooling, perhaps a product,
perhaps normalisation. What the engine has no operation for is refused when it would be used, and not before: the same
checkpoint may generate, or be pooled otherwise. Modules are known by the last part of their class names: the packages
before it have changed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.errors import ModelError
from slipstream.fields import Fields, read_json, read_json_if_present
from slipstream.pooling import PoolingDefaults
from slipstream.values import describe_value

if TYPE_CHECKING:
    import torch  # takes seconds; looking for a model needs none

MODULES_FILE = "modules.json"
_DENSE_WEIGHTS = "model.safetensors"
# The pooling's kinds by their flags; newer files have one of the words alone.
_FLAG = "pooling_mode_"
_KINDS = {
    "lasttoken": "last",
    "cls_token": "cls",
    "cls": "cls",
    "mean_tokens": "mean",
    "mean": "mean",
    "max_tokens": "max",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
    "weightedmean": "weighted_mean",
}
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid", "GELU": "gelu"}
_MAX_SIZE = 1 << 18


class DenseStep(NamedTuple):
    """One dense layer: x -> activation(weight x + bias)."""

    weight: torch.Tensor  # [out_size, in_size]
    bias: torch.Tensor | None  # [out_size]
    activation: str = ""


def read_pooling(folder: Path) -> PoolingDefaults:
    file, defaults = folder / MODULES_FILE, _read_prompts(folder)
    if not file.is_file():
        return defaults
    pooling, is_normalised, refusal, size = "last", False, "", 0
    for kind, path in _read_modules(file):
        if kind == "Pooling":
            pooling, refusal = _read_kind(read_json(folder / path / "config.json"), refusal, defaults)
        elif kind == "Normalize":
            is_normalised = True
        elif kind == "Dense" and not is_normalised:
            size = read_json(folder / path / "config.json").integer("out_features", high=_MAX_SIZE)
        elif kind != "Transformer":
            refusal = refusal or f"{file} has a module {describe_value(kind)}, which is not supported"
    return replace(defaults, pooling=pooling, normalize=is_normalised, refusal=refusal, size=size, is_stated=True)


def read_dense_steps(folder: Path) -> list[DenseStep]:
    """The dense layers between pooling and normalisation."""
    file = folder / MODULES_FILE
    modules = _read_modules(file) if file.is_file() else []
    return [_read_dense(folder / path) for kind, path in modules if kind == "Dense"]


def read_text_limit(folder: Path) -> int | None:
    """The most tokens of a text, special ones included, that vectors are made for."""
    fields = read_json_if_present(folder / "sentence_bert_config.json")
    return fields.integer("max_seq_length") if fields.has("max_seq_length") else None


def _read_dense(folder: Path) -> DenseStep:
    from safetensors import SafetensorError, safe_open

    fields, file = read_json(folder / "config.json"), folder / _DENSE_WEIGHTS
    name = fields.text("activation_function", "Identity").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{fields.source} has activation {describe_value(name)}, which is not supported")
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            bias = tensors.get_tensor("linear.bias") if fields.flag("bias", True) else None
            return DenseStep(tensors.get_tensor("linear.weight"), bias, _ACTIVATIONS[name])
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again") from error


def _read_prompts(folder: Path) -> PoolingDefaults:
    """What is put before texts, by name."""
    fields = read_json_if_present(folder / "config_sentence_transformers.json")
    prompts = fields.section("prompts")
    named = tuple((name, prompts.text(name)) for name in prompts if prompts.has(name))
    default = fields.text("default_prompt_name") if fields.has("default_prompt_name") else None
    return PoolingDefaults(prompts=named, default_prompt=default)


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """Class names, and folders relative to the checkpoint's."""
    try:
        modules: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{file} must hold a list of modules; download it again")
    found = []
    for module in modules:
        fields = Fields(module, str(file))
        path = fields.text("path", "")
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ModelError(f"{file} names the folder {describe_value(path)}, which is outside of the checkpoint")
        found.append((fields.text("type").rpartition(".")[2], path))
    return found


def _read_kind(fields: Fields, refusal: str, defaults: PoolingDefaults) -> tuple[str, str]:
    """The kind of pooling, and why it is not supported if it is not."""
    if not fields.flag("include_prompt", True) and any(text for _, text in defaults.prompts):
        refusal = refusal or f"{fields.source} leaves prompts out of the pooling, which is not supported"
    chosen = [name for name in _KINDS if f"{_FLAG}{name}" in fields and fields.flag(f"{_FLAG}{name}")]
    if fields.has("pooling_mode"):
        chosen = [fields.text("pooling_mode")]
    if len(chosen) == 1 and chosen[0] in _KINDS:
        return _KINDS[chosen[0]], refusal
    named = " and ".join(map(describe_value, chosen)) or "none"
    return "last", refusal or f"{fields.source} asks for pooling {named}, which is not supported"
