"""A launcher that holds every operation to its declaration: the shape function, and what it says it writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slipstream.device.operation import Operation, set_launcher, spec_of


def _check_shapes(op: Operation[Any, Any], result: Any, expected: Any) -> None:
    if isinstance(result, torch.Tensor):
        found: Any = spec_of(result)
    elif result is None:
        found = None
    else:
        found = tuple(spec_of(t) for t in result)
    assert found == expected, f"{op.name} returned {found}, its shape function says {expected}"


@contextmanager
def checked_operations(compare_inputs: bool) -> Iterator[None]:
    """``compare_inputs`` also proves that nothing undeclared is written; it copies every argument."""

    def launch(op: Operation[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        expected = op.shape(*args, **kwargs)
        named = op.signature.bind(*args, **kwargs).arguments
        read_only = {n: t for n, t in named.items() if isinstance(t, torch.Tensor) and n not in op.writes}
        before = {n: t.clone() for n, t in read_only.items()} if compare_inputs else {}
        result = op.body(*args, **kwargs)
        _check_shapes(op, result, expected)
        for name, copy in before.items():
            assert torch.equal(copy.nan_to_num(), read_only[name].nan_to_num()), f"{op.name} changed {name}"
        return result

    set_launcher("cpu", launch)
    try:
        yield
    finally:
        set_launcher("cpu", None)
