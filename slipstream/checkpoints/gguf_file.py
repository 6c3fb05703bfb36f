"""The GGUF container: metadata, a table of tensors, and their raw bytes through a memory map.

Knows the layout of versions 2 and 3 (little-endian), not the meaning of the keys. Every count in a file is checked
against the size of the file before it is used.

The ``gguf`` package has a reader too, but it builds array objects for each of the 100,000 strings of a tokenizer and
takes two seconds for what is done here in a tenth.
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
from slipstream.values import describe_value

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 8
# Metadata becomes Python objects, so it is limited further than by the file's size, which may be a hundred gigabytes.
# The largest published tokenizers have a million entries in all, and the largest text in use is a tokenizer.json.
_MAX_ITEMS = 1 << 23
_MAX_STRING_BYTES = 1 << 26
_MAX_DEPTH = 4  # of arrays in arrays
_MIN_VALUE_BYTES = 8 + 4 + 1  # an empty key, a type, the smallest value
_MIN_ROW_BYTES = 8 + 4 + 4 + 8  # of the tensor table: an empty name, no dimensions

_Row = tuple[str, tuple[int, ...], int, int]  # a row of the tensor table: name, shape, encoding, offset of the data

_STRING, _ARRAY = 8, 9
# Value types of fixed size, as `struct` spells them: (u)int 8, 16, 32; float32; bool; (u)int 64; float64.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorEntry:
    """One line of the tensor table."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch; reversed in the file
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
        self._position, self._num_items = 0, 0
        try:
            self.metadata, self.tensors = self._read(block_sizes)
        except (UnicodeDecodeError, _MalformedError) as error:
            raise self._broken(str(error)) from error

    def raw(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """The tensor's bytes: a read-only view of the file, nothing is read yet."""
        return np.frombuffer(self._map, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)

    def read(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """The bytes copied to new memory. The map would count the file's pages as the process's memory."""
        return np.fromfile(self.path, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is half-downloaded or not a GGUF file ({reason}); download it again")

    def _read(self, block_sizes: dict[int, tuple[int, int]]) -> tuple[dict[str, Any], list[TensorEntry]]:
        if self._map[:4] != _MAGIC:
            raise _MalformedError("it does not start with GGUF")
        self._position = 4
        version, num_tensors, num_values = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} is a GGUF of version {version}; versions 2 and 3 are supported, convert it")
        metadata = self._read_metadata(num_values)
        rows = self._read_table(num_tensors)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment <= 0:
            raise _MalformedError(f"its alignment is {describe_value(alignment)}")
        data_start = -(-self._position // alignment) * alignment
        return metadata, [self._locate(row, data_start, block_sizes) for row in rows]

    def _read_metadata(self, num_values: int) -> dict[str, Any]:
        self._check_count(num_values, _MIN_VALUE_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in metadata:
                raise _MalformedError(f"it has the key {describe_value(key)} twice")
            metadata[key] = self._value(self._unpack("<I")[0])
        return metadata

    def _read_table(self, num_tensors: int) -> list[_Row]:
        self._check_count(num_tensors, _MIN_ROW_BYTES)
        rows: dict[str, _Row] = {}
        for _ in range(num_tensors):
            row = self._tensor_row()
            if row[0] in rows:
                raise _MalformedError(f"it has the tensor {describe_value(row[0])} twice")
            rows[row[0]] = row
        return list(rows.values())

    def _check_count(self, count: int, num_bytes: int) -> None:
        """Raise unless ``count`` entries of at least ``num_bytes`` each fit into the rest of the file."""
        if count * num_bytes > len(self._map) - self._position:
            raise _MalformedError(f"it ends before the {count} entries that it promises")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        if length > _MAX_STRING_BYTES:
            raise _MalformedError(f"it has a text of {length} bytes")
        return self._take(length).decode("utf-8")

    def _strings(self, count: int) -> list[str]:
        """Equals ``count`` calls of ``_string``, but faster: a tokenizer has several hundred thousand strings."""
        content, position, found = self._map, self._position, []
        for _ in range(count):
            begin = position + 8
            length = int.from_bytes(content[position:begin], "little")
            if length > _MAX_STRING_BYTES:
                raise _MalformedError(f"it has a text of {length} bytes")
            position = begin + length
            if position > len(content):
                raise _MalformedError("it ends within its metadata")
            found.append(content[begin:position].decode("utf-8"))
        self._position = position
        return found

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._map):
            raise _MalformedError("it ends within its metadata")
        content = self._map[self._position : end]
        self._position = end
        return content

    def _value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(depth + 1)
        if type_id in _SCALARS:
            return self._unpack("<" + _SCALARS[type_id])[0]
        raise _MalformedError(f"it holds a value of unknown type {type_id}")

    def _array(self, depth: int) -> list[Any]:
        item_type, count = self._unpack("<IQ")
        self._num_items += count
        if self._num_items > _MAX_ITEMS:
            raise _MalformedError(f"its metadata has an array of {count} items; {_MAX_ITEMS} in all are supported")
        if depth > _MAX_DEPTH:
            raise _MalformedError(f"its metadata nests arrays more than {_MAX_DEPTH} deep")
        if item_type in _SCALARS:
            layout = f"<{count}{_SCALARS[item_type]}"
            return list(struct.unpack(layout, self._take(struct.calcsize(layout))))
        if item_type == _STRING:
            return self._strings(count)
        return [self._value(item_type, depth) for _ in range(count)]

    def _tensor_row(self) -> _Row:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        if num_dims > _MAX_DIMS:
            raise _MalformedError(f"tensor {describe_value(name)} claims {num_dims} dimensions")
        dims = self._unpack(f"<{num_dims}Q")
        type_id, offset = self._unpack("<IQ")
        return name, dims[::-1], type_id, offset

    def _locate(self, row: _Row, data_start: int, block_sizes: dict[int, tuple[int, int]]) -> TensorEntry:
        name, shape, type_id, offset = row
        shown = describe_value(name)
        if type_id not in block_sizes:
            raise ModelError(
                f"{self.path}: {shown} has an encoding ({type_id}) that `gguf` does not know; update `gguf`"
            )
        block_elements, block_bytes = block_sizes[type_id]
        if not shape or not all(shape) or shape[-1] % block_elements:
            raise _MalformedError(f"the shape of {shown}, {list(shape)}, is empty or no multiple of its block")
        entry = TensorEntry(name, shape, type_id, data_start + offset, prod(shape) // block_elements * block_bytes)
        if entry.offset + entry.num_bytes > len(self._map):
            raise _MalformedError(f"the data of {shown} lies past its end")
        return entry


class _MalformedError(Exception):
    """The bytes violate the format; the reader turns this into a ModelError that names the file."""
