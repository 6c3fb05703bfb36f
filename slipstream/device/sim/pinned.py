"""Pinned host memory: the host may touch it when no copy in flight does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice

# Calls that look at a tensor's shape or make a view of it, and at no value.
_LOOKS_AT_NO_VALUE = frozenset(
    [
        "__get__",
        "__getitem__",
        "view",
        "reshape",
        "narrow",
        "flatten",
        "unbind",
        "split",
        "chunk",
        "size",
        "stride",
        "dim",
        "numel",
        "element_size",
        "storage_offset",
        "untyped_storage",
        "is_contiguous",
        "is_pinned",
        "as_subclass",
        "detach",
        "data_ptr",
        "__len__",
        "nelement",
    ]
)
# Calls that give the memory away, to read or to write.
_GIVES_AWAY = frozenset(("numpy", "__array__", "__setitem__"))


class SimPinned(torch.Tensor):
    """A CPU tensor whose every use by the host is checked against the copies in flight."""

    device_: SimDevice

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name not in _LOOKS_AT_NO_VALUE:
            from slipstream.device.sim.device import SimDevice

            device = SimDevice.current()
            in_place = name in _GIVES_AWAY or (name.endswith("_") and not name.endswith("__"))
            for i, value in enumerate(args):
                if isinstance(value, SimPinned):
                    device.host_access(value, name, writes=in_place and i == 0)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def plain(tensor: Tensor) -> Tensor:
    """The same memory without the checks, for queued work."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)
