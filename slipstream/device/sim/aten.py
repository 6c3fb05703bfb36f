"""The simulated device's knowledge of torch operators: which synchronise, which are views, and their output specs."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

aten = torch.ops.aten

# Operators that synchronise on CUDA although torch's tags do not say so. The table in tests/sync_calls.py, which this
# follows, was checked on an NVIDIA H200.
UNTAGGED_SYNCS = frozenset({"bincount"})
# Composite operators that run as one: decomposing them would only be slower.
_LEAVES = frozenset({"linear", "matmul", "scaled_dot_product_attention", "rms_norm", "layer_norm", "repeat_interleave"})
# In-place operators that overwrite their target without reading it.
_OVERWRITERS = frozenset(
    {"copy_", "fill_", "zero_"}
    | {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
)
# Operators that take a shape from their tensor but read no value; the first three write none either.
EMPTIES = frozenset({"empty_like", "new_empty", "new_empty_strided"})
_LIKES = EMPTIES | {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
_LIKES |= {"rand_like", "randint_like", "randn_like"}


class Kind(enum.Enum):
    COMPOSITE = enum.auto()  # composed of others: decomposed
    HOST_READ = enum.auto()  # its result, or its result's shape, depends on values
    VIEW = enum.auto()  # new shape, same memory
    RESHAPED = enum.auto()  # a view that replaces its own tensor
    METADATA = enum.auto()  # a question about shapes or types
    COPY = enum.auto()
    TO_COPY = enum.auto()
    COMPUTE = enum.auto()


@functools.cache
def kind_of(func: OpOverload) -> Kind:
    name = func._schema.name.removeprefix("aten::")
    if name == "copy_":
        return Kind.COPY
    if name == "_to_copy":
        return Kind.TO_COPY
    # Checked first: `to` and `reshape` are tagged as possible views, and decide when they are decomposed.
    decomposes = torch._C._dispatch_has_kernel_for_dispatch_key(func._name, DispatchKey.CompositeImplicitAutograd)
    if decomposes and name not in _LEAVES:
        return Kind.COMPOSITE
    if func.is_view or name in ("_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh"):
        return Kind.VIEW
    if torch.Tag.inplace_view in func.tags:
        return Kind.RESHAPED
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags or name in UNTAGGED_SYNCS:
        return Kind.HOST_READ
    gives_tensors = any("Tensor" in str(result.type) for result in func._schema.returns)
    return Kind.COMPUTE if gives_tensors or written_by(func).any else Kind.METADATA


def waits(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call synchronises. Some operators do so for some arguments only."""
    name = func._schema.name
    if name == "aten::index":
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name in ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
        accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        indices = [index for index in args[1] if index is not None]
        masked = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        is_fill = len(indices) == 1 and args[2].ndim == 0 and not accumulates
        return masked and not is_fill  # assigning one number with one mask is a masked fill
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None and func._overloadname != "self_int"
    return kind_of(func) is Kind.HOST_READ


class Written(NamedTuple):
    """Which arguments an operator changes."""

    positions: tuple[int, ...]
    names: tuple[str, ...]
    overwrites: bool  # without reading them first

    @property
    def any(self) -> bool:
        return bool(self.positions or self.names)


@functools.cache
def written_by(func: OpOverload) -> Written:
    positions: list[int] = []
    names: list[str] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.kwarg_only:
                names.append(argument.name)
            else:
                positions.append(i)
    name = func._schema.name.removeprefix("aten::")
    return Written(tuple(positions), tuple(names), bool(names) or name in _OVERWRITERS)


@functools.cache
def looks_at_no_value(func: OpOverload) -> bool:
    return func._schema.name.removeprefix("aten::") in _LIKES


@functools.cache
def returns_only_what_it_writes(func: OpOverload) -> bool:
    return all(result.alias_info is not None for result in func._schema.returns)


@functools.cache
def _is_pointwise(func: OpOverload) -> bool:
    return torch.Tag.pointwise in func.tags


class Spec(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def spec_of(tensor: Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype)


_inferred: dict[Any, Any] = {}


def infer(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Specs of the results, from specs alone: one ``Spec``, a tuple of them, or None. Shape errors are raised here."""
    # No shape depends on a float of a pointwise operator; some depend on those of `arange`.
    exact = not _is_pointwise(func)
    key = (func, _signature(args, exact), _signature(tuple(sorted(kwargs.items())), exact))
    found = _inferred.get(key)
    if found is None and key not in _inferred:
        with torch.inference_mode(False), torch.no_grad():
            result = func(*_on_meta(args), **{name: _on_meta(value) for name, value in kwargs.items()})
        found = _inferred[key] = _specs(result)
    return found


def _signature(value: Any, exact: bool) -> Any:
    if isinstance(value, Tensor):
        return spec_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_signature(v, exact) for v in value)
    if isinstance(value, float) and not exact:
        return float
    return type(value), value  # True equals 1 as a dictionary key, but not in torch


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(v) for v in value)
    return value


def _specs(result: Any) -> Any:
    if isinstance(result, Tensor):
        return spec_of(result)
    if isinstance(result, (list, tuple)):
        return tuple(_specs(r) for r in result)
    return None
