"""A launcher that holds every operation to its declaration: what comes out, and what it says it writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slipstream.device.operation import Operation, map_tensors, set_launcher, spec_of


def _check_shapes(op: Operation[Any, Any], result: Any, expected: Any) -> None:
    if isinstance(result, torch.Tensor):
        found: Any = spec_of(result)
    elif result is None:
        found = None
    else:
        found = tuple(spec_of(t) for t in result)
    assert found == expected, f"{op.name} returned {found}, declared is {expected}"


@contextmanager
def checked_operations(compare_inputs: bool) -> Iterator[None]:
    """``compare_inputs`` also proves that nothing undeclared is written; it copies every argument."""

    def launch(op: Operation[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = op.bind(args, kwargs)
        expected = op.specs(arguments)
        read_only: list[tuple[str, torch.Tensor]] = []

        def note(name: str, tensor: torch.Tensor) -> None:
            if not op.changes(name):
                read_only.append((name, tensor))

        for name, value in arguments.items():
            map_tensors(value, name, note)
        before = [tensor.clone() for _, tensor in read_only] if compare_inputs else []
        result = op.body(*args, **kwargs)
        _check_shapes(op, result, expected)
        for (name, tensor), copy in zip(read_only, before, strict=False):
            assert torch.equal(copy.nan_to_num(), tensor.nan_to_num()), f"{op.name} changed {name}"
        return result

    set_launcher("cpu", launch)
    try:
        yield
    finally:
        set_launcher("cpu", None)
