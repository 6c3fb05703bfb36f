"""Files of a training: tensors with a description, written atomically and verified when read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import ConfigError


def write_store(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Replace the file atomically: a process that is killed meanwhile leaves the previous one."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"about": json.dumps(about), "digest": _digest(tensors)}
    half = path.with_name(path.name + ".half")
    save_file(tensors, half, metadata=metadata)
    with half.open("rb+") as file:
        os.fsync(file.fileno())
    half.replace(path)


def read_store(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        about = json.loads(metadata["about"])
        if metadata["digest"] != _digest(tensors):
            raise ValueError("its content does not match its checksum")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is damaged ({reason}); delete it and run the command again") from error
    return tensors, about


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
