"""How a checkpoint's vectors are made, as the files of sentence-transformers beside it say.

``modules.json`` lists what hidden states go through, each module with a folder of its own: pooling, perhaps a product,
perhaps normalisation. What the engine has no operation for is refused when it would be used, and not before: the same
checkpoint may generate, or be pooled otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from slipstream.errors import ModelError
from slipstream.fields import Fields, read_json
from slipstream.pooling import PoolingDefaults
from slipstream.values import describe_value

MODULES_FILE = "modules.json"
# The pooling's kinds by their flags; newer files have one of the words alone.
_FLAG = "pooling_mode_"
_KINDS = {"lasttoken": "last", "cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean"}
_OTHER_KINDS = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")


def read_pooling(folder: Path) -> PoolingDefaults:
    file = folder / MODULES_FILE
    if not file.is_file():
        return PoolingDefaults()
    pooling, is_normalised, refusal = "last", False, ""
    for kind, path in _read_modules(file):
        if kind == "Pooling":
            pooling, refusal = _read_kind(read_json(folder / path / "config.json"), refusal)
        elif kind == "Normalize":
            is_normalised = True
        elif kind != "Transformer":
            refusal = refusal or f"{file} has a module {describe_value(kind)}, which is not supported"
    return PoolingDefaults(pooling, is_normalised, refusal)


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


def _read_kind(fields: Fields, refusal: str) -> tuple[str, str]:
    """The kind of pooling, and why it is not supported if it is not."""
    chosen = [name for name in (*_KINDS, *_OTHER_KINDS) if f"{_FLAG}{name}" in fields and fields.flag(f"{_FLAG}{name}")]
    if fields.has("pooling_mode"):
        chosen = [fields.text("pooling_mode")]
    if len(chosen) == 1 and chosen[0] in _KINDS:
        return _KINDS[chosen[0]], refusal
    named = " and ".join(map(describe_value, chosen)) or "none"
    return "last", refusal or f"{fields.source} asks for pooling {named}, which is not supported"
