"""Recording a step's launches on a CPU while they run, and running them again.

On a CPU a launch is a call from Python. Its views, sizes and addresses take longer to find than a small kernel takes to
run, and are the same whenever the same batch comes again. A recording keeps what computes: calls of compiled kernels
with their addresses, and torch's own operations, together with all memory they use. Like a graph of a GPU, it is valid
for steps whose launches are the same: values in device memory may change, numbers of the host may not.

What a list of calls cannot repeat is found out while recording:

- an operation whose body reads values is called again as a whole, and so is one whose kernel returns another status;
- outside of operations, a value that the host reads makes the recording useless (``refused`` says why), and so does a
  read of a host array that is given as ``watch(array)``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.device.operation import Operation, set_launcher

# Of torch's operations: allocate without filling; let the host read what is in memory; ask about types alone.
_ALLOCATE = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_READ = {"aten::resolve_conj", "aten::resolve_neg", "aten::lift_fresh", "aten::equal", "aten::is_nonzero", "aten::item"}
_READING_TAGS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}

_here = threading.local()
_lock = threading.Lock()
_num_recorders = 0


@dataclass(slots=True)
class _Launch:
    """Calls that belong together: those of one operation, or one of torch's."""

    calls: list[tuple[Callable[..., Any], tuple[Any, ...], Any]]  # function, arguments, what it must return
    again: Callable[[], None] | None = None  # all of it, where a call returns something else


@dataclass(slots=True)
class Recording:
    """A step's launches, to be run again on the same memory."""

    launches: list[_Launch] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # memory that the addresses are of

    def replay(self) -> None:
        for launch in self.launches:
            for function, arguments, expected in launch.calls:
                if function(*arguments) != expected:
                    assert launch.again is not None
                    launch.again()
                    break


class Recorder:
    """Takes down the launches of this thread. Use it as a context, once."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.refused: str | None = None
        self._watching = _TorchWatch(self)
        self._operation: _Launch | None = None  # whose body runs
        self._is_plain = True  # that operation is its calls

    def __enter__(self) -> Recorder:
        global _num_recorders
        assert recorder() is None, "recordings do not nest"
        with _lock:
            _num_recorders += 1
            set_launcher("cpu", _launch)
        _here.recorder = self
        self._watching.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        global _num_recorders
        self._watching.__exit__(*error)  # type: ignore[no-untyped-call]
        _here.recorder = None
        with _lock:
            _num_recorders -= 1
            if not _num_recorders:
                set_launcher("cpu", None)

    def launch(self, operation: Operation[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and take it down."""
        run = operation.on_cpu or operation.body
        if self._operation is not None:  # part of the one around it
            return run(*args, **kwargs)
        taken, self._is_plain = _Launch([]), True
        self._operation = taken
        try:
            out = run(*args, **kwargs)
        finally:
            self._operation = None
        self.recording.kept.append((args, kwargs, out))

        def again() -> None:
            _copy(out, run(*args, **kwargs))

        taken.again = again
        if not self._is_plain or not taken.calls:
            taken.calls = [(again, (), None)]
        self.recording.launches.append(taken)
        return out

    def refuse(self, reason: str) -> None:
        """The host has used a value: an operation is called again for that; anything else cannot be repeated."""
        if self._operation is not None:
            self._is_plain = False
        elif self.refused is None:
            self.refused = reason

    def note_call(self, function: Callable[..., Any], arguments: tuple[Any, ...], returned: Any) -> None:
        self.recording.kept.append(arguments)
        call = (function, arguments, returned)
        if self._operation is not None:
            self._operation.calls.append(call)
        else:
            self.recording.launches.append(_Launch([call]))

    def note_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One of torch's operations has run: what it made stays in memory, and what computed is taken down."""
        self.recording.kept.append(out)
        name = function._schema.name
        if name in _READ or _READING_TAGS & set(function.tags):
            self.refuse(f"{name} reads a value")
        elif function._schema.is_mutable:
            self.note_call(_run_torch, (function, args, kwargs), None)
        elif name not in _ALLOCATE and not _is_view(out, (args, kwargs)):
            self.note_call(_run_torch_into, (function, args, kwargs, out), None)


def recorder() -> Recorder | None:
    """The one that takes down the launches of this thread."""
    return getattr(_here, "recorder", None)


def watch(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array. A program that reads a number of it, while this thread records, cannot be repeated."""
    return array.view(_WatchedArray)


class RecordedLibrary:
    """A library of compiled functions whose calls are taken down."""

    def __init__(self, library: Any, to: Recorder) -> None:
        self._library, self._to = library, to

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            returned = function(*arguments)
            self._to.note_call(function, arguments, returned)
            return returned

        return call


def _launch(operation: Operation[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of every operation on CPU tensors while some thread records."""
    if (own := recorder()) is not None:
        return own.launch(operation, args, kwargs)
    return (operation.on_cpu or operation.body)(*args, **kwargs)


class _TorchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, to: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._to = to

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler, which takes a second and 100 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._to.note_torch(func, args, kwargs, out)
        return out


class _WatchedArray(np.ndarray[Any, Any]):
    """Arithmetic on it is watched, too: only when a number leaves the arrays is it read. ``np.array`` is not seen."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [x.view(np.ndarray) if isinstance(x, _WatchedArray) else x for x in inputs]
        if "out" in kwargs:
            _note_read("an array of the host")
            kwargs["out"] = tuple(x.view(np.ndarray) if isinstance(x, _WatchedArray) else x for x in kwargs["out"])
        out = getattr(ufunc, method)(*plain, **kwargs)
        if isinstance(out, np.ndarray):
            return out.view(_WatchedArray)
        _note_read("an array of the host")
        return out

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _note_read("an array of the host")
        return super().__array_function__(func, types, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        out = super().__getitem__(key)
        if not isinstance(out, np.ndarray):
            _note_read("an array of the host")
        return out

    def tolist(self) -> Any:
        _note_read("an array of the host")
        return super().tolist()

    def item(self, *args: Any) -> Any:
        _note_read("an array of the host")
        return super().item(*args)


def _note_read(what: str) -> None:
    if (own := recorder()) is not None:
        # Not a device's value, so that an operation around it does not help.
        own.refused = own.refused or f"the host reads {what}"


def _run_torch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    function(*args, **kwargs)


def _run_torch_into(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    _copy(out, function(*args, **kwargs))


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, Tensor):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
    elif isinstance(target, tuple | list):
        for own, other in zip(target, source, strict=True):
            _copy(own, other)


def _is_view(out: Any, inputs: Any) -> bool:
    """Whether nothing was computed: no tensors, or other views of memory that was there."""
    there = {tensor.untyped_storage().data_ptr() for tensor in _tensors(inputs)}
    return all(tensor.untyped_storage().data_ptr() in there for tensor in _tensors(out))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
