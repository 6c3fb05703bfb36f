"""Pinned host memory: the host may access it only while no copy of it is in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice

# Calls that read a tensor's shape and type, but no value.
_LOOKS_AT_NO_VALUE = frozenset(
    {"__get__", "__hash__", "__len__", "as_subclass", "data_ptr", "dim", "element_size", "get_device", "is_contiguous"}
    | {"is_floating_point", "is_pinned", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"}
    | {"untyped_storage"}
)
# Calls that expose the memory for reading or writing.
_GIVES_AWAY = frozenset({"numpy", "__array__"})


class SimPinned(torch.Tensor):
    """A CPU tensor whose every use by the host is checked against the copies in flight."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from slipstream.device.sim.device import SimDevice

        kwargs, name, device = kwargs or {}, func.__name__, SimDevice.current()
        with torch._C.DisableTorchFunctionSubclass():
            if name in _LOOKS_AT_NO_VALUE or any(tensor.device.type == "sim" for tensor in _tensors(args)):
                return _as_pinned(device, func(*args, **kwargs))  # copies from and to the device are checked elsewhere
            changed, inputs = _changed_and_inputs(device, name, args, kwargs)
            for tensor in changed:
                if device.is_pinned(tensor):
                    device.host_access(device.region(tensor, writes=True), name)
            result = func(*args, **kwargs)
            if changed or not _is_late(device, result):
                for tensor in inputs:
                    if device.is_pinned(tensor):
                        device.host_access(device.region(tensor, writes=False), name)
            return _as_pinned(device, result)


def _changed_and_inputs(
    device: SimDevice, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    rest = [value for key, value in kwargs.items() if key != "out"]
    if name == "__setitem__":
        part = args[0][args[1]]
        # Indexed elements may be anywhere.
        return [part if device.is_pinned(part) else args[0]], list(_tensors(args[1:]))
    if name in _GIVES_AWAY or (name.endswith("_") and not name.endswith("__")):
        return [args[0]], list(_tensors((*args[1:], *rest)))
    return list(_tensors((kwargs.get("out"),))), list(_tensors((*args, *rest)))


def _is_late(device: SimDevice, result: Any) -> bool:
    """A view has read no value yet, and a copy to the device reads later."""
    parts = list(_tensors((result,)))
    return bool(parts) and all(part.device.type == "sim" or device.is_pinned(part) for part in parts)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _as_pinned(device: SimDevice, result: Any) -> Any:
    """Views of pinned memory are pinned; results of computations are not."""
    if isinstance(result, Tensor):
        is_pinned = result.device.type == "cpu" and device.is_pinned(result)
        return result.as_subclass(SimPinned) if is_pinned else result
    if isinstance(result, (list, tuple)) and next(_tensors(result), None) is not None:
        return type(result)([_as_pinned(device, part) for part in result])
    return result


def plain(tensor: Tensor) -> Tensor:
    """The same memory without the checks, for queued work."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)
