"""The GGUF container: metadata, a table of tensors, and their raw bytes through a memory map.

Knows the layout of versions 2 and 3 (little-endian). Does not know what the keys mean. The ``gguf`` package has a
reader too, but it builds array objects for each of the 100,000 strings of a tokenizer and takes two seconds for what
is done here in a tenth.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 8

_STRING, _ARRAY = 8, 9
# Value types of fixed size, as `struct` spells them: (u)int 8, 16, 32; float32; bool; (u)int 64; float64.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorEntry:
    """One line of the tensor table."""

    name: str
    shape: tuple[int, ...]  # rows first, as torch counts; the file stores it the other way round
    type_id: int  # ggml's number for the encoding
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file. ``block_sizes`` maps an encoding to (elements, bytes) of one block."""

    def __init__(self, path: Path, block_sizes: dict[int, tuple[int, int]]) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise self._broken(str(error)) from error
        self._position = 0
        try:
            self.metadata, self.tensors = self._read(block_sizes)
        except (struct.error, UnicodeDecodeError, _MalformedError) as error:
            raise self._broken(str(error)) from error

    def raw(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """The tensor's bytes: a read-only view of the file, nothing is read yet."""
        return np.frombuffer(self._map, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is half-downloaded or not a GGUF file ({reason}); download it again")

    def _read(self, block_sizes: dict[int, tuple[int, int]]) -> tuple[dict[str, Any], list[TensorEntry]]:
        if self._map[:4] != _MAGIC:
            raise _MalformedError("it does not start with GGUF")
        self._position = 4
        version, num_tensors, num_values = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} is a GGUF of version {version}; versions 2 and 3 are supported, convert it")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I")[0])
        rows = [self._tensor_row() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _MalformedError(f"its alignment is {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        return metadata, [self._place(row, data_start, block_sizes) for row in rows]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._map, self._position)
        self._position += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        return self._take(length).decode("utf-8")

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._map):
            raise _MalformedError("it ends within its metadata")
        content = self._map[self._position : end]
        self._position = end
        return content

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            item_type, count = self._unpack("<IQ")
            if item_type in _SCALARS:
                layout = f"<{count}{_SCALARS[item_type]}"
                return list(struct.unpack(layout, self._take(struct.calcsize(layout))))
            return [self._value(item_type) for _ in range(count)]
        if type_id in _SCALARS:
            return self._unpack("<" + _SCALARS[type_id])[0]
        raise _MalformedError(f"it holds a value of unknown type {type_id}")

    def _tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        if num_dims > _MAX_DIMS:
            raise _MalformedError(f"tensor {name} claims {num_dims} dimensions")
        dims = self._unpack(f"<{num_dims}Q")
        type_id, offset = self._unpack("<IQ")
        return name, dims[::-1], type_id, offset

    def _place(
        self, row: tuple[str, tuple[int, ...], int, int], data_start: int, block_sizes: dict[int, tuple[int, int]]
    ) -> TensorEntry:
        name, shape, type_id, offset = row
        if type_id not in block_sizes:
            raise ModelError(
                f"{self.path}: {name} has an encoding ({type_id}) that `gguf` does not know; update `gguf`"
            )
        block_elements, block_bytes = block_sizes[type_id]
        if not shape or shape[-1] % block_elements:
            raise _MalformedError(f"the rows of {name} are no multiple of its block")
        entry = TensorEntry(name, shape, type_id, data_start + offset, prod(shape) // block_elements * block_bytes)
        if entry.offset + entry.num_bytes > len(self._map):
            raise _MalformedError(f"the data of {name} lies past its end")
        return entry


class _MalformedError(Exception):
    """The bytes are not what the format promises; the reader turns this into a ModelError that names the file."""
