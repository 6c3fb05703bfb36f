"""The container of CTranslate2's ``model.bin``: variables by name, and aliases, through a memory map.

Knows its sixth version (little-endian), not what the variables mean. Every count is checked against the size of the
file before it is used. A quantised variable has its scales in another, named after it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.errors import ModelError
from slipstream.values import describe_value

_VERSION = 6
_MAX_DIMS = 8
_MIN_VARIABLE_BYTES = 2 + 1 + 1 + 4  # an empty name, rank 0, a type, no data
_MIN_ALIAS_BYTES = 2 + 2
_MAX_NAME_BYTES = 1024
# By the file's number: float32, int8, int16, int32, float16, bfloat16.
_DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Variable:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # from the start of the file


class _MalformedError(Exception):
    pass


class CTranslate2File:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise self._broken(str(error)) from error
        self._position = 0
        try:
            self._read()
        except (UnicodeDecodeError, _MalformedError) as error:
            raise self._broken(str(error)) from error

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of a variable's numbers, in its own type."""
        variable = self.variables[name]
        data = np.fromfile(self.path, np.uint8, prod(variable.shape) * variable.dtype.itemsize, offset=variable.offset)
        return torch.from_numpy(data).view(variable.dtype).view(variable.shape)

    def number(self, name: str, default: int | None = None) -> int:
        """A variable that holds one integer."""
        variable = self.variables.get(name)
        if variable is None and default is not None:
            return default
        if variable is None or variable.shape or variable.dtype.is_floating_point:
            raise ModelError(f"{self.path} has no number '{name}'; convert the model again")
        return int(self.tensor(name))

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is half-downloaded or not CTranslate2's ({reason}); download it again")

    def _read(self) -> None:
        (version,) = self._unpack("<I")
        if version != _VERSION:
            raise _MalformedError(f"its version is {version}, {_VERSION} is supported")
        self.spec = self._string()
        self.revision, num_variables = self._unpack("<II")
        self._check_count(num_variables, _MIN_VARIABLE_BYTES)
        self.variables: dict[str, Variable] = {}
        for _ in range(num_variables):
            self._add(self._variable())
        (num_aliases,) = self._unpack("<I")
        self._check_count(num_aliases, _MIN_ALIAS_BYTES)
        for _ in range(num_aliases):
            alias, name = self._string(), self._string()
            if name not in self.variables:
                raise _MalformedError(
                    f"{describe_value(alias)} is an alias of {describe_value(name)}, which is missing"
                )
            known = self.variables[name]
            self._add(Variable(alias, known.shape, known.dtype, known.offset))

    def _add(self, variable: Variable) -> None:
        if variable.name in self.variables:
            raise _MalformedError(f"it has {describe_value(variable.name)} twice")
        self.variables[variable.name] = variable

    def _variable(self) -> Variable:
        name = self._string()
        (rank,) = self._unpack("<B")
        if rank > _MAX_DIMS:
            raise _MalformedError(f"{describe_value(name)} has {rank} dimensions")
        shape = self._unpack(f"<{rank}I")
        type_id, num_bytes = self._unpack("<BI")
        if type_id >= len(_DTYPES):
            raise _MalformedError(f"{describe_value(name)} is of type {type_id}")
        dtype, offset = _DTYPES[type_id], self._position
        if prod(shape) * dtype.itemsize != num_bytes:
            raise _MalformedError(f"{describe_value(name)} of shape {list(shape)} has {num_bytes} bytes")
        self._skip(num_bytes)
        return Variable(name, shape, dtype, offset)

    def _check_count(self, count: int, num_bytes: int) -> None:
        """Raise unless so many entries of at least ``num_bytes`` each fit into the rest of the file."""
        if count * num_bytes > len(self._map) - self._position:
            raise _MalformedError(f"it ends before the {count} entries that it promises")

    def _string(self) -> str:
        (length,) = self._unpack("<H")
        if not 0 < length <= _MAX_NAME_BYTES:
            raise _MalformedError(f"it has a name of {length} bytes")
        begin = self._position
        self._skip(length)
        return self._map[begin : begin + length].rstrip(b"\0").decode("utf-8")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        begin = self._position
        self._skip(struct.calcsize(layout))
        return struct.unpack(layout, self._map[begin : self._position])

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > len(self._map) - self._position:
            raise _MalformedError(f"it ends after {len(self._map)} bytes")
        self._position += num_bytes
