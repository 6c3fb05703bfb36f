"""Checkpoints of draft heads: a config and tensors, in safetensors or in the ``.bin`` files of older heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import SafetensorsCheckpoint
from slipstream.checkpoints.tensor_header import TensorHeader
from slipstream.errors import ModelError
from slipstream.fields import Fields, read_json


class HeadCheckpoint(NamedTuple):
    config: Fields
    headers: list[TensorHeader]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


def open_head_checkpoint(folder: Path) -> HeadCheckpoint:
    """A folder with safetensors, or with the ``.bin`` files of older heads."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not the folder of a draft head; check the path")
    files = sorted(folder.glob("pytorch_model*.bin"))
    if files and not any(folder.glob("*.safetensors")):
        shapes = (pair for file in files for pair in load_bin(file, device="meta"))  # without memory
        headers = [TensorHeader(name, tuple(tensor.shape), tensor.dtype) for name, tensor in shapes]
        return HeadCheckpoint(
            read_json(folder / "config.json"), headers, lambda: (pair for file in files for pair in load_bin(file))
        )
    checkpoint = SafetensorsCheckpoint(folder)
    return HeadCheckpoint(checkpoint.config, checkpoint.tensor_headers(), checkpoint.tensors)


def load_bin(path: Path, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file that ``torch.save`` wrote. No code in it is executed."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(f"{path} cannot be read ({reason}); download it again") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise ModelError(f"{path} must hold tensors by name; download it again")
    yield from content.items()
