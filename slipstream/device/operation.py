"""Opaque device operations.

A kernel is one operation: a body that computes, and a shape function that gives the outputs' specs without computing.
The host reads nothing else, so a device may queue the body and run it later. On a device without its own queue (the
CPU; CUDA, whose driver queues launches) the body is called at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class TensorSpec(NamedTuple):
    """Shape and type of an output."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Specs = TensorSpec | tuple[TensorSpec, ...] | None
Launcher = Callable[["Operation[Any, Any]", tuple[Any, ...], dict[str, Any]], Any]

_launchers: dict[str, Launcher] = {}
_operations: dict[str, Operation[Any, Any]] = {}


class Operation(Generic[P, R]):
    """A device operation. Its first argument is a tensor; ``writes`` names the arguments that it changes in place."""

    def __init__(self, body: Callable[P, R], shape: Callable[P, Specs], writes: Sequence[str]) -> None:
        self.name = body.__name__.strip("_")
        self.body = body
        self.shape = shape
        self.writes = tuple(writes)
        self.signature = inspect.signature(body)
        self.parameters = tuple(self.signature.parameters)
        self.__doc__ = body.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, torch.Tensor)
        launch = _launchers.get(first.device.type)
        if launch is None:
            return self.body(*args, **kwargs)
        result: R = launch(self, args, kwargs)
        return result


def operation(shape: Callable[P, Specs], writes: Sequence[str] = ()) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Declare the decorated function as one device operation."""

    def decorate(body: Callable[P, R]) -> Operation[P, R]:
        made = Operation(body, shape, writes)
        if made.name in _operations:
            raise ValueError(f"two operations are called {made.name}")
        _operations[made.name] = made
        return made

    return decorate


def all_operations() -> dict[str, Operation[Any, Any]]:
    return dict(_operations)


def set_launcher(device_type: str, launch: Launcher | None) -> None:
    """Let a device handle the launch of every operation on its tensors, or, with None, stop doing so."""
    if launch is None:
        _launchers.pop(device_type, None)
    else:
        _launchers[device_type] = launch


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def writes_only(*_args: Any, **_kwargs: Any) -> None:
    """The shape function of an operation that returns nothing."""
