"""Tensors of the simulated device: their shapes are known at once, their values later.

A ``SimTensor`` wraps a piece of CPU memory that only queued operations may touch. Every torch operator on it becomes a
queued operation with freshly allocated results, a view, or, where a GPU would make the host wait, an error that names
the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

from slipstream.device.sim import aten
from slipstream.device.sim.aten import Kind, Spec, Written
from slipstream.device.sim.check import Region, SimError, call_site
from slipstream.device.sim.memory import Handle, poison, region_of
from slipstream.device.sim.pinned import plain
from slipstream.device.sync_guard import HostSyncError

if TYPE_CHECKING:
    from slipstream.device.sim.device import SimDevice


class SimTensor(torch.Tensor):
    memory: Tensor  # the memory as a CPU tensor; only queued work may access it
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
        return f"SimTensor({tuple(self.shape)}, {self.dtype})"  # printing values would synchronise

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

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:  # modules convert their parameters this way
        assert isinstance(other, SimTensor)
        torch._C.TensorBase.data.__set__(self, other)  # type: ignore[attr-defined]
        self.memory, self.handle = other.memory, other.handle


def read(tensor: SimTensor, what: str) -> Tensor:
    """The values, for the host: an error unless synchronising is allowed here."""
    device = tensor.device_
    device.wait_for_all(what)
    device.host_access(device.region(tensor, writes=False), what)
    return tensor.memory.clone()


def dispatch(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    kind = aten.kind_of(func)
    if kind is Kind.COMPOSITE:
        return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    if kind is Kind.VIEW:
        source = args[0]
        with torch.inference_mode(False):
            return _wrap_views(func(source.memory, *args[1:], **kwargs), source)
    if kind is Kind.RESHAPED:
        return _reshape_in_place(func, args, kwargs)
    if kind is Kind.METADATA:
        return func(*_unwrapped(args), **{key: _unwrapped(value) for key, value in kwargs.items()})
    if kind is Kind.COPY:
        return copy(args[0], args[1], non_blocking=bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
    if kind is Kind.TO_COPY:
        return _to_copy(args[0], kwargs)
    device = _device_of(args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    if aten.waits(func, args, kwargs):
        return _read_and_compute(device, func, name, args, kwargs)
    return _compute(device, func, name, args, kwargs)


def _wrap_views(result: Any, source: SimTensor) -> Any:
    if isinstance(result, Tensor):
        return SimTensor(result, source.handle, source.device_)
    return type(result)(SimTensor(part, source.handle, source.device_) for part in result)


def _reshape_in_place(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> SimTensor:
    source: SimTensor = args[0]
    if func._schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_"):
        raise SimError(f"{call_site(func.__name__)}: a tensor keeps the memory it was allocated with")
    with torch.inference_mode(False):
        inner = source.memory.view(source.memory.shape)
        func(inner, *args[1:], **kwargs)
    source.data = SimTensor(inner, source.handle, source.device_)
    return source


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
    """An operator that reads values: where synchronising is allowed it waits, and its result is known at once."""
    device.wait_for_all(name)
    written = aten.written_by(func)
    if written.names:
        raise SimError(f"{call_site(name)}: the size of its out= depends on values")
    operands = _Operands(device, name)
    own_args, own_kwargs = operands.convert_all(args, kwargs, written)
    for region in operands.regions:
        device.host_access(region, name)
    with torch.inference_mode(False), torch.no_grad():
        result = func(*own_args, **own_kwargs)
    return _changed(func, args, kwargs) if written.any else _on_device(device, result)


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
    """Arguments converted to memory, with the regions they touch."""

    def __init__(self, device: SimDevice, what: str) -> None:
        self._device = device
        self._what = what
        self.regions: list[Region] = []

    def convert_all(self, args: Sequence[Any], kwargs: dict[str, Any], written: Written) -> tuple[list[Any], Any]:
        own_args = [self._convert_one(v, i in written.positions, written.overwrites) for i, v in enumerate(args)]
        own_kwargs = {k: self._convert_one(v, k in written.names, written.overwrites) for k, v in kwargs.items()}
        return own_args, own_kwargs

    def _convert_one(self, value: Any, writes: bool, overwrites: bool) -> Any:
        return self.convert(value, writes, reads=not (writes and overwrites))

    def convert(self, value: Any, writes: bool = False, reads: bool = True) -> Any:
        if isinstance(value, SimTensor):
            region = region_of(value.memory, value.handle.block, writes=writes, reads=reads)
            if region is not None:
                self.regions.append(region)
            return value.memory
        if isinstance(value, Tensor):
            if value.ndim:
                self._device.refuse_in_recording(self._what)
                self._device.sync_guard.check(f"{call_site(self._what)}: a host tensor among its arguments")
            return self._device.host_values(value, self._what)  # a number, read now
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, (list, tuple)):
            return type(value)(self.convert(v, writes, reads) for v in value)
        return value


def _compute(device: SimDevice, func: OpOverload, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    specs = aten.infer(func, args, kwargs)
    if name in aten.EMPTIES:
        return device.allocate(specs, name)
    written = aten.written_by(func)
    for i, key in enumerate(written.names):
        _make_room(device, kwargs[key], specs if isinstance(specs, Spec) else specs[i])
    operands = _Operands(device, name)
    own_args, own_kwargs = operands.convert_all(args, kwargs, written)
    if written.any:
        if not aten.returns_only_what_it_writes(func):
            raise SimError(f"{call_site(name)}: an operator that writes to its arguments and returns others")
        device.launch(lambda: func(*own_args, **own_kwargs), name, operands.regions)
        return _changed(func, args, kwargs)
    outputs = device.allocate_all(specs, name)
    regions = [] if aten.looks_at_no_value(func) else operands.regions
    device.launch_into(lambda: func(*own_args, **own_kwargs), name, regions, outputs)
    return outputs


def _changed(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The results of an operator that writes to its arguments: those arguments."""
    written = aten.written_by(func)
    if not func._schema.returns:
        return None
    changed = [args[i] for i in written.positions] + [kwargs[key] for key in written.names]
    return changed[0] if len(changed) == 1 else tuple(changed)


def _make_room(device: SimDevice, out: SimTensor, spec: Spec) -> None:
    """torch lets an empty ``out`` grow; here it gets new memory."""
    if tuple(out.shape) == spec.shape:
        return
    if out.numel():
        raise ValueError(f"{call_site('out')}: out has shape {tuple(out.shape)}, the result {spec.shape}")
    out.data = device.allocate(spec._replace(dtype=out.dtype), "out")


# --- copies ---------------------------------------------------------------------------------------


def copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    if target.shape != source.shape:
        aten.infer(aten.aten.copy_.default, (target, source), {})  # mismatched shapes are an error now
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
                device.refuse_in_recording("copy_")
                device.sync_guard.check(f"{call_site('copy_')}: a copy from pageable memory")
            _upload(device, target, source)
    else:
        assert isinstance(source, SimTensor)
        if non_blocking and source.device_.is_pinned(target):
            source.device_.copy_async(target, source)
        else:
            values = read(source, "copy_ to the host")
            if source.device_.is_pinned(target):
                source.device_.host_access(source.device_.region(target, writes=True), "copy_")
            plain(target).copy_(values)
    return target


def _upload(device: SimDevice, target: SimTensor, source: Tensor) -> None:
    operands = _Operands(device, "copy_")
    into = operands.convert(target, writes=True, reads=False)
    values = device.host_values(source, "copy_")
    device.launch(lambda: into.copy_(values), "copy_", operands.regions)


def _to_copy(source: SimTensor, kwargs: dict[str, Any]) -> Tensor:
    where = kwargs.get("device")
    if where is not None and torch.device(where).type == "cpu":
        return read(source, "to the host").to(kwargs.get("dtype") or source.dtype)
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
    return _compute(source.device_, aten.aten._to_copy.default, "to", [source], rest)  # type: ignore[no-any-return]


__all__ = ["SimTensor", "dispatch", "poison", "read"]
