"""Tensors of the simulated device: they have shapes at once and values later.

A ``SimTensor`` wraps a piece of CPU memory that only queued operations may touch. Every torch operator on it becomes a
queued operation with freshly allocated results, a view, or, where a GPU would make the host wait, an error that names
the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

from slipstream.device.sim import aten
from slipstream.device.sim.aten import Kind, Spec, infer, kind_of, waits, written_by
from slipstream.device.sim.check import Region, call_site
from slipstream.device.sim.memory import Handle, poison, region_of
from slipstream.device.sync_guard import HostSyncError

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice


class SimTensor(torch.Tensor):
    memory: Tensor  # the memory, as CPU tensors see it; only queued work may look
    handle: Handle
    device_: SimDevice

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, handle: Handle, device: SimDevice) -> SimTensor:
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=device.torch_device,
            )
        made.memory, made.handle, made.device_ = inner, handle, device
        found: SimTensor = made
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimTensor({tuple(self.shape)}, {self.dtype})"  # values would have to be waited for

    def __format__(self, _spec: str) -> str:
        return repr(self)

    def tolist(self) -> Any:
        return read(self, "tolist").tolist()

    def numpy(self, *_args: Any, **_kwargs: Any) -> Any:
        return read(self, "numpy").numpy()

    def __array__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.numpy()

    def __dlpack__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise HostSyncError(f"{call_site('__dlpack__')}: device memory cannot be handed to the host")

    def data_ptr(self) -> NoReturn:
        raise HostSyncError(f"{call_site('data_ptr')}: only queued operations may address device memory")

    def __deepcopy__(self, _memo: Any) -> Any:
        return self.clone()


def read(tensor: SimTensor, what: str) -> Tensor:
    """The values, for the host: an error unless this place may wait."""
    device = tensor.device_
    device.refuse_in_recording(what)
    device.sync_guard.check(str(call_site(what)))
    device.drain()
    return tensor.memory.clone()


def dispatch(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    kind = kind_of(func)
    if kind is Kind.COMPOSITE:
        return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    if kind is Kind.VIEW:
        source = args[0]
        with torch.inference_mode(False):
            return _wrap_views(func(source.memory, *args[1:], **kwargs), source)
    if kind is Kind.RESHAPED:
        source = args[0]
        inner = source.memory.view(source.memory.shape)
        func(inner, *args[1:], **kwargs)
        source.data = SimTensor(inner, source.handle, source.device_)
        source.memory = inner
        return source
    if kind is Kind.COPY:
        return copy(args[0], args[1], non_blocking=bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
    if kind is Kind.TO_COPY:
        return _to_copy(args[0], kwargs)
    device = _device_of(args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    if waits(func, args, kwargs):
        return _read_and_compute(device, func, name, args, kwargs)
    return _compute(device, func, name, args, kwargs)


def _wrap_views(result: Any, source: SimTensor) -> Any:
    if isinstance(result, Tensor):
        return SimTensor(result, source.handle, source.device_)
    return type(result)(SimTensor(part, source.handle, source.device_) for part in result)


def _device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> SimDevice:
    for value in (*args, *kwargs.values()):
        if isinstance(value, SimTensor):
            return value.device_
        if isinstance(value, (list, tuple)):
            for part in value:
                if isinstance(part, SimTensor):
                    return part.device_
    raise AssertionError("an operation without a tensor of the simulated device")


def _read_and_compute(
    device: SimDevice, func: OpOverload, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """An operator that looks at values: where waiting is allowed it waits, and its result is known at once."""
    device.refuse_in_recording(name)
    device.sync_guard.check(str(call_site(name)))
    device.drain()
    with torch.inference_mode(False), torch.no_grad():
        result = func(*_unwrapped(args), **{key: _unwrapped(value) for key, value in kwargs.items()})
    return _on_device(device, result)


def _unwrapped(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value.memory
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrapped(v) for v in value)
    return value


def _on_device(device: SimDevice, result: Any) -> Any:
    if isinstance(result, Tensor):
        target = device.allocate(Spec(tuple(result.shape), result.stride(), result.dtype), "result")
        _upload(device, target, result)
        return target
    if isinstance(result, (list, tuple)):
        return type(result)(_on_device(device, part) for part in result)
    return result


class _Operands:
    """Arguments turned into memory, with the regions they touch."""

    def __init__(self, device: SimDevice, what: str) -> None:
        self._device = device
        self._what = what
        self.regions: list[Region] = []

    def convert(self, value: Any, writes: bool = False, reads: bool = True) -> Any:
        if isinstance(value, SimTensor):
            region = region_of(value.memory, value.handle.block, writes=writes, reads=reads)
            if region is not None:
                self.regions.append(region)
            return value.memory
        if isinstance(value, Tensor):
            if value.ndim:
                self._device.sync_guard.check(f"{call_site(self._what)}: a host tensor among its arguments")
            return value.clone()  # a number, frozen now
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, (list, tuple)):
            return type(value)(self.convert(v, writes, reads) for v in value)
        return value


def _compute(device: SimDevice, func: OpOverload, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    specs = infer(func, args, kwargs)
    written = written_by(func)
    for key in written.names:
        _make_room(device, kwargs[key], specs)
    operands = _Operands(device, name)
    reads_target = not written.overwrites
    own_args = [
        operands.convert(v, i in written.positions, reads_target or i not in written.positions)
        for i, v in enumerate(args)
    ]
    own_kwargs = {
        key: operands.convert(v, key in written.names, reads_target or key not in written.names)
        for key, v in kwargs.items()
    }
    if written.positions or written.names:
        device.launch(lambda: _run(func, own_args, own_kwargs), name, operands.regions)
        changed = [args[i] for i in written.positions] + [kwargs[key] for key in written.names]
        return changed[0] if len(changed) == 1 else tuple(changed)
    outputs = device.allocate_all(specs, name)
    device.launch_into(lambda: func(*own_args, **own_kwargs), name, operands.regions, outputs)
    return outputs


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    func(*args, **kwargs)


def _make_room(device: SimDevice, out: SimTensor, spec: Spec) -> None:
    """torch lets an empty ``out`` grow; here it gets new memory."""
    if tuple(out.shape) == spec.shape:
        return
    if out.numel():
        raise ValueError(f"{call_site('out')}: out has shape {tuple(out.shape)}, the result {spec.shape}")
    grown = device.allocate(spec._replace(dtype=out.dtype), "out")
    out.data = grown
    out.memory, out.handle = grown.memory, grown.handle


# --- copies ---------------------------------------------------------------------------------------


def copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    if isinstance(target, SimTensor) and isinstance(source, SimTensor):
        operands = _Operands(target.device_, "copy_")
        into = operands.convert(target, writes=True, reads=False)
        values = operands.convert(source)
        target.device_.launch(lambda: into.copy_(values), "copy_", operands.regions)
    elif isinstance(target, SimTensor):
        device = target.device_
        if non_blocking and device.is_pinned(source):
            device.copy_async(target, source)
        else:
            if source.ndim:
                device.sync_guard.check(f"{call_site('copy_')}: a copy from pageable memory")
            _upload(device, target, source)
    else:
        assert isinstance(source, SimTensor)
        if non_blocking and source.device_.is_pinned(target):
            source.device_.copy_async(target, source)
        else:
            target.copy_(read(source, "copy_ to the host"))
    return target


def _upload(device: SimDevice, target: SimTensor, source: Tensor) -> None:
    operands = _Operands(device, "copy_")
    into = operands.convert(target, writes=True, reads=False)
    values = source.clone()
    device.launch(lambda: into.copy_(values), "copy_", operands.regions)


def _to_copy(source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    where = kwargs.get("device")
    dtype = kwargs.get("dtype") or source.dtype
    if not isinstance(source, SimTensor):
        from slipstream.device.sim.device import SimDevice

        device = SimDevice.current()
        target = device.allocate(Spec(tuple(source.shape), source.contiguous().stride(), dtype), "to")
        return copy(target, source, bool(kwargs.get("non_blocking")))
    if where is not None and torch.device(where).type == "cpu":
        return read(source, "to the host").to(dtype)
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
    return _compute(source.device_, aten.aten._to_copy.default, "to", [source], rest)  # type: ignore[no-any-return]


__all__ = ["SimTensor", "dispatch", "poison", "read"]
