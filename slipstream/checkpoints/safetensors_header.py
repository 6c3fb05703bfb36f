"""The header of a safetensors file: its tensors' names, shapes and types, checked against the length of the file.

The data is not read, and every number of the header is checked against the size of the file. That every tensor has as
many bytes as its shape needs is checked by the package when the file is opened.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch

from slipstream.checkpoints.tensor_header import TensorHeader
from slipstream.errors import ModelError
from slipstream.values import describe_value

_MAX_HEADER_BYTES = 100_000_000  # the package's own limit
_MAX_DIMS = 8
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def read_header(file: Path) -> list[TensorHeader]:
    """The tensors of one file in the order of their data, after a check of the file's length."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_len = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_len > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{file} is half-downloaded or not a safetensors file; download it again")
            header = json.loads(stream.read(header_len))
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, "it is not JSON") from error
    if not isinstance(header, dict):
        raise _corrupt(file, "it is not an object")
    header.pop("__metadata__", None)
    spans = {name: _read_span(file, name, entry) for name, entry in header.items()}
    end = 8 + header_len + max((end for _, end in spans.values()), default=0)
    if end > size:
        raise ModelError(f"{file} is half-downloaded ({size} of {end} bytes); download it again")
    return [_read_entry(file, name, header[name], size) for name in sorted(spans, key=lambda name: spans[name])]


def _read_span(file: Path, name: str, entry: Any) -> tuple[int, int]:
    span = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _are_counts(span) or len(span) != 2 or span[0] > span[1]:
        raise _corrupt(file, f"{describe_value(name)} lies at {describe_value(span)}")
    return span[0], span[1]


def _read_entry(file: Path, name: str, entry: dict[str, Any], size: int) -> TensorHeader:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    # A byte holds at most two numbers, whatever the type.
    if not _are_counts(shape) or len(shape) > _MAX_DIMS or max(shape, default=0) > 2 * size or prod(shape) > 2 * size:
        raise _corrupt(file, f"{describe_value(name)} has shape {describe_value(shape)}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ModelError(
            f"{file}: {describe_value(name)} is stored as {describe_value(dtype)}; supported: {', '.join(_DTYPES)}"
        )
    return TensorHeader(name, tuple(shape), _DTYPES[dtype])


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _corrupt(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file} has a corrupt header ({reason}); download it again")
