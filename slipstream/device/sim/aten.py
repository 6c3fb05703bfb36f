"""What the simulated device knows of torch's operators: which wait for the device, which are views, what comes out."""

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

# Operators that make the host wait on CUDA though torch's tags do not say so. Checked on an NVIDIA H200 by
# tests/gpu/test_sync_guard.py.
UNTAGGED_SYNCS = frozenset(
    {"bincount", "linalg_inv_ex", "linalg_solve_ex", "masked_scatter", "unique_consecutive", "unique_dim"}
)
# Composite operators that run as one: what they decompose into would only be slower.
_LEAVES = frozenset({"linear", "matmul", "scaled_dot_product_attention", "rms_norm", "layer_norm", "repeat_interleave"})
# In-place operators that overwrite their target without looking at it.
_OVERWRITERS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_"})


class Kind(enum.Enum):
    COMPOSITE = enum.auto()  # made of others: decomposed
    HOST_READ = enum.auto()  # its result, or its result's shape, depends on values
    VIEW = enum.auto()  # new shape, same memory
    RESHAPED = enum.auto()  # a view that replaces its own tensor
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
    if func.is_view or name in ("_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh"):
        return Kind.VIEW
    if torch.Tag.inplace_view in func.tags:
        return Kind.RESHAPED
    decomposes = torch._C._dispatch_has_kernel_for_dispatch_key(func._name, DispatchKey.CompositeImplicitAutograd)
    if decomposes and name not in _LEAVES:
        return Kind.COMPOSITE
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags or name in UNTAGGED_SYNCS:
        return Kind.HOST_READ
    return Kind.COMPUTE


def waits(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call would wait. Some operators do so for some arguments only."""
    name = func._schema.name
    if name == "aten::index":
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name in ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masked and args[2].numel() != 1  # one value into a mask is a masked fill
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    return kind_of(func) is Kind.HOST_READ


class Written(NamedTuple):
    """Which arguments an operator changes."""

    positions: tuple[int, ...]
    names: tuple[str, ...]
    overwrites: bool  # without reading them first


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


class Spec(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def spec_of(tensor: Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype)


_inferred: dict[Any, Any] = {}


def infer(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Shapes of the results, from shapes alone: one ``Spec``, a tuple of them, or None. Shape errors are raised now."""
    key = (func, _signature(args), _signature(tuple(sorted(kwargs.items()))))
    found = _inferred.get(key)
    if found is None and key not in _inferred:
        with torch.inference_mode(False), torch.no_grad():
            result = func(*_on_meta(args), **{name: _on_meta(value) for name, value in kwargs.items()})
        found = _inferred[key] = _specs(result)
    return found


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return spec_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_signature(v) for v in value)
    return float if isinstance(value, float) else value


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
