"""Arguments of operations from values by name: tests give each tensor once, and do not repeat what belongs together."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import torch

from slipstream.device.operation import Operation, map_tensors
from slipstream.kernels.request_rows import RowState


def bundle(op: Operation[Any, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The operation's arguments: those given by name, and bundles put together from values named as their fields.

    Columns of the rows that are not given are empty, so that an operation which looks at one fails.
    """
    unused = set(values)
    types = typing.get_type_hints(op.body)
    arguments = {}
    for name in op.signature.parameters:
        made = _make(types[name], name, values, unused)
        if made is not _MISSING:
            arguments[name] = made
    assert not unused, f"{op.name} takes no {', '.join(sorted(unused))}"
    return arguments


def make_rows(**columns: torch.Tensor) -> RowState:
    """Rows of which only these columns matter."""
    made = _make(RowState, "", columns, set(columns))
    assert isinstance(made, RowState)
    return made


def written(op: Operation[Any, Any], arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that the operation says it writes, by name."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        if op.changes(name):
            found[name] = tensor

    for name, value in arguments.items():
        map_tensors(value, name, note)
    return found


_MISSING = object()


def _make(kind: Any, name: str, values: Mapping[str, Any], unused: set[str]) -> Any:
    if name in values:
        unused.discard(name)
        return values[name]
    kinds = [part for part in typing.get_args(kind) or (kind,) if part is not type(None)]
    if len(kinds) != 1 or not (dataclasses.is_dataclass(kinds[0]) or hasattr(kinds[0], "_fields")):
        return _MISSING
    bundle_type: Any = kinds[0]
    parts = {n: _make(t, n, values, unused) for n, t in typing.get_type_hints(bundle_type).items()}
    if all(part is _MISSING for part in parts.values()):
        return _MISSING
    if len(kinds) < len(typing.get_args(kind)) and all(part is None or part is _MISSING for part in parts.values()):
        return None
    if bundle_type is RowState:
        parts = {n: torch.empty(0, dtype=torch.int32) if part is _MISSING else part for n, part in parts.items()}
    return bundle_type(**{n: part for n, part in parts.items() if part is not _MISSING})
