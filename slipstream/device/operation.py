"""Opaque device operations.

A kernel is one operation: a body that computes, and a declaration of its outputs' specs, which are found without
computing. The host reads nothing else, so a device may queue the body and run it later. On a device without its own
queue (the CPU; CUDA, whose driver queues launches) the body is called at once.

Arguments that belong together are a bundle: a frozen dataclass or a NamedTuple of tensors. The body is given the
bundle itself. A device that queues operations flattens it by name (``map_tensors``): ``rows.num_tokens`` is a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

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
_fields: dict[type, tuple[str, ...] | None] = {}  # by kind of argument


class Operation(Generic[P, R]):
    """A device operation. ``writes`` names the arguments, or fields of bundles, that it changes in place.

    Its outputs have the shapes and types of the arguments that ``like`` names, or those that ``shape`` computes from
    the arguments named by its parameters. Without either it returns nothing.
    """

    def __init__(
        self,
        body: Callable[P, R],
        shape: Callable[..., Specs] | None,
        like: str | tuple[str, ...] | None,
        writes: Sequence[str],
    ) -> None:
        self.name = body.__name__.strip("_")
        self.body = body
        # Computes the same on CPU tensors, faster; a device with a launcher of its own runs the body.
        self.on_cpu: Callable[P, R] | None = None
        self.like = like
        self.writes = tuple(writes)
        self.signature = inspect.signature(body)
        self._shape = shape
        self._shape_names = () if shape is None else tuple(inspect.signature(shape).parameters)
        self.__doc__ = body.__doc__
        if shape is not None and like is not None:
            raise ValueError(f"{self.name}: either a shape function or like")
        if shape is None and like is None and not writes:
            raise ValueError(f"{self.name} neither returns nor writes anything")
        named = [*self._shape_names, *((like,) if isinstance(like, str) else like or ()), *self.writes]
        for name in named:
            if name.partition(".")[0] not in self.signature.parameters:
                raise ValueError(f"{self.name} has no argument called {name.partition('.')[0]}")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _launchers:
            launch = _launchers.get(_device_type((*args, *kwargs.values())))
            if launch is not None:
                result: R = launch(self, args, kwargs)
                return result
        if self.on_cpu is not None and _device_type((*args, *kwargs.values())) == "cpu":
            return self.on_cpu(*args, **kwargs)
        return self.body(*args, **kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def specs(self, arguments: dict[str, Any]) -> Specs:
        """What comes out for these arguments, by name."""
        if self._shape is not None:
            return self._shape(*(arguments[name] for name in self._shape_names))
        if self.like is None:
            return None
        if isinstance(self.like, str):
            return spec_of(_find(arguments, self.like))
        return tuple(spec_of(_find(arguments, name)) for name in self.like)

    def changes(self, name: str) -> bool:
        """Whether a tensor is declared as written: by its own name, or by that of a bundle around it."""
        return any(name == written or name.startswith(f"{written}.") for written in self.writes)


def operation(
    shape: Callable[..., Specs] | None = None,
    *,
    like: str | tuple[str, ...] | None = None,
    writes: Sequence[str] = (),
) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Declare the decorated function as one device operation."""

    def decorate(body: Callable[P, R]) -> Operation[P, R]:
        made = Operation(body, shape, like, writes)
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


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def map_tensors(value: Any, name: str, change: Callable[[str, Tensor], Any]) -> Any:
    """The same argument with each of its tensors replaced by what ``change`` gives for the tensor's name and itself.

    Fields of a bundle are called ``bundle.field``; entries of a list have the list's name.
    """
    if isinstance(value, Tensor):
        return change(name, value)
    fields = _bundle_fields(type(value))
    if fields is not None:
        parts = {field: map_tensors(getattr(value, field), f"{name}.{field}", change) for field in fields}
        if isinstance(value, tuple):
            return type(value)(**parts)
        # Not by its constructor, which may compute fields of its own.
        made = object.__new__(type(value))
        for field, part in parts.items():
            object.__setattr__(made, field, part)
        return made
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(part, name, change) for part in value)
    return value


def _bundle_fields(kind: type) -> tuple[str, ...] | None:
    """Of a frozen dataclass or a NamedTuple; None of anything else, which comes to the body as it is."""
    if kind not in _fields:
        _fields[kind] = _find_fields(kind)
    return _fields[kind]


def _find_fields(kind: type) -> tuple[str, ...] | None:
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple(kind._fields)
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    return tuple(field.name for field in dataclasses.fields(kind)) if parameters and parameters.frozen else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif (fields := _bundle_fields(type(value))) is not None:
        for field in fields:
            yield from _tensors(getattr(value, field))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _device_type(arguments: tuple[Any, ...]) -> str:
    """Of the first tensor among the arguments."""
    first = arguments[0]
    while not isinstance(first, Tensor):  # usually the first field of a bundle
        fields = _bundle_fields(type(first))
        if not fields:
            first = next(_tensors(arguments))
            break
        first = getattr(first, fields[0])
    return first.device.type


def _find(arguments: dict[str, Any], name: str) -> Tensor:
    first, *fields = name.split(".")
    found = functools.reduce(getattr, fields, arguments[first])
    assert isinstance(found, Tensor)
    return found
