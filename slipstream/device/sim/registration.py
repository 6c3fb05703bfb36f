"""Making ``sim`` a device that torch knows, so that factories, copies and numbers reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, set_launcher
from slipstream.device.sim.aten import Spec
from slipstream.device.sim.tensor import SimTensor, copy, read

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice

_libraries: list[torch.library.Library] = []  # registrations last as long as their library does


def register(current: Callable[[], SimDevice]) -> None:
    """Only where a simulated device is made: torch would prefer it over a real accelerator."""
    if _libraries:
        return
    # The first shape inference would import this, and the import keeps the stack it happens on, tensors and all: memory
    # would be freed later in the first world of a process than in the same world ever after.
    import torch._dynamo
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("sim")
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)

    def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_rest: Any) -> Tensor:
        return current().allocate(TensorSpec(tuple(size), dtype or torch.get_default_dtype()), "empty")

    def empty_strided(
        size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_rest: Any
    ) -> Tensor:
        spec = Spec(tuple(size), tuple(stride), dtype or torch.get_default_dtype())
        return current().allocate(spec, "empty_strided")

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return copy(target, source, non_blocking)

    def local_scalar_dense(source: SimTensor) -> Any:
        return read(source, "item").item()

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", local_scalar_dense, "PrivateUse1")
    set_launcher("sim", lambda op, args, kwargs: current().launch_operation(op, args, kwargs))
