"""Triton where it can run: on a GPU, or interpreted on a CPU for tests.

Kernels use ``jit`` and ``tl`` from here, so that every kernel file can be imported without Triton, and operations then
run the reference.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slipstream.config import triton_requested

triton: Any = None
tl: Any = None
gpu: Any = None
_background: Any = None
if torch.cuda.is_available() or triton_requested():  # elsewhere it would take half a second and 50 MB for nothing
    with suppress(ImportError):  # a platform without Triton
        triton, tl = import_module("triton"), import_module("triton.language")
        gpu = import_module("triton.language.extra.cuda")
    with suppress(ImportError):  # a Triton that compiles kernels one by one
        _background = import_module("triton.runtime._async_compile")

_interpreted = False
# Per thread: engines in other threads continue meanwhile.
_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)
_MOST_COMPILERS = 16
_SLOW_S = 0.05
logger = logging.getLogger("slipstream.kernels")


def _kernel(function: Callable[..., None], **options: Any) -> Any:
    if triton is None:
        return function
    if _background is None or triton.knobs.runtime.interpret:
        return triton.jit(**options)(function)
    return _kernel_class()(function, **options)


@functools.cache
def _kernel_class() -> type:
    class Kernel(triton.runtime.JITFunction):  # type: ignore[misc]
        """A kernel that can be compiled without being run (``compile_ahead``)."""

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return super().run(*args, grid=grid, warmup=warmup or _compiles_only.get(), **kwargs)

        def _do_compile(self, key: Any, signature: Any, device: Any, *rest: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            kernel = super()._do_compile(key, signature, device, *rest, **kwargs)
            if (seconds := time.monotonic() - begin) > _SLOW_S:  # in the middle of a step this delays requests
                logger.debug("compiled %s in %.2f s", self.__name__, seconds)
            if _compiles_only.get() and kernel is not None:
                # Requested again before it is compiled, it is not looked up by its source a second time.
                self.device_caches[device][0].setdefault(key, kernel)
            return kernel

    return Kernel


def jit(function: Callable[..., None]) -> Any:
    """``triton.jit``, or nothing without Triton."""
    return _kernel(function)


def jit_general(*names: str) -> Callable[[Callable[..., None]], Any]:
    """``jit`` of one kernel for all values of these arguments: Triton would specialise for the number 1."""
    return lambda function: _kernel(function, do_not_specialize=list(names))


class _WithoutValues(TorchFunctionMode):
    """Memory is filled with zeros and no index values are read: the kernels that would write them do not run, and the
    memory may hold values of another step or a larger batch. Lookups read the first entry, and writes by index are
    skipped.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WRITES or (func is Tensor.__setitem__ and _has_numbers(args[1])):
            return args[0]
        if func in _REPETITIONS and "output_size" in kwargs:
            return _repeat_first(*args, **kwargs)
        if func in _LOOKUPS:
            index_arg = _LOOKUPS[func]
            args = (*args[:index_arg], *map(_firsts, args[index_arg : index_arg + 1]), *args[index_arg + 1 :])
            kwargs = {name: _firsts(value) if name in _INDEX_NAMES else value for name, value in kwargs.items()}
        out = func(*args, **kwargs)
        return out.zero_() if func in (torch.empty, torch.empty_like, Tensor.new_empty) else out


# With the position of the index among the arguments.
_LOOKUPS = {
    Tensor.__getitem__: 1,
    F.embedding: 0,
    torch.embedding: 1,
    torch.index_select: 2,
    Tensor.index_select: 2,
    torch.gather: 2,
    Tensor.gather: 2,
    torch.take: 1,
    Tensor.take: 1,
    torch.take_along_dim: 1,
    Tensor.take_along_dim: 1,
}
_INDEX_NAMES = ("index", "indices", "input")
_WRITES = (
    Tensor.index_put_,
    Tensor.index_copy_,
    Tensor.index_add_,
    Tensor.index_fill_,
    Tensor.scatter_,
    Tensor.scatter_add_,
    Tensor.scatter_reduce_,
    Tensor.put_,
    torch.index_put_,
    # If these return a new tensor, the old one is returned instead.
    Tensor.index_put,
    Tensor.index_copy,
    Tensor.index_add,
    Tensor.index_fill,
    Tensor.scatter,
    Tensor.scatter_add,
    torch.index_put,
    torch.index_copy,
    torch.index_add,
    torch.index_fill,
    torch.scatter,
    torch.scatter_add,
)
_REPETITIONS = (torch.repeat_interleave, Tensor.repeat_interleave)


def _is_number(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64)


def _has_numbers(index: Any) -> bool:
    return any(map(_is_number, index)) if isinstance(index, tuple | list) else _is_number(index)


def _firsts(index: Any) -> Any:
    """The same index, with every entry replaced by the first."""
    if isinstance(index, tuple | list):
        return type(index)(map(_firsts, index))
    return torch.zeros_like(index) if _is_number(index) else index


def _repeat_first(values: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int) -> Tensor:
    if repeats is None:  # the values are then the repeats, and the results are indices
        return values.new_zeros(output_size)
    values = values.flatten() if dim is None else values
    return values.index_select(dim or 0, torch.zeros(output_size, dtype=torch.int64, device=values.device))


def num_compilers() -> int:
    """How many kernels are compiled at a time."""
    return max(1, min(_MOST_COMPILERS, os.cpu_count() or 1))


def compiles_ahead(device: torch.device) -> bool:
    return device.type == "cuda" and _background is not None


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Kernels launched inside do not run, and are compiled in parallel when the context ends."""
    before = _compiles_only.set(True)
    try:
        # In threads: most of a compilation is native code and other programs, which release the GIL.
        with ThreadPoolExecutor(num_compilers()) as pool, _background.AsyncCompileMode(pool), _WithoutValues():
            yield
    finally:
        _compiles_only.reset(before)


def runs_triton(tensor: Tensor) -> bool:
    """Whether an operation on this tensor uses its Triton kernel."""
    return tensor.is_cuda or _interpreted


def interprets() -> bool:
    """Whether kernels run on CPU tensors now, for tests."""
    return _interpreted


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels run on CPU tensors inside. Needs ``TRITON_INTERPRET=1`` set before the kernels were imported."""
    global _interpreted
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before


@functools.cache
def _starts_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def early_start(tensor: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that may start while the previous one still runs (``wait_for_last``)."""
    early = tensor.is_cuda and _starts_early(tensor.device)
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})


@jit
def wait_for_last(EARLY: tl.constexpr):
    """After this call the previous kernel has ended.

    A kernel that starts early calls it before it reads or writes anything that the previous kernel may write. Kernels
    before that one have ended: it waited for them before it let this one start (``let_next_start``).
    """
    if EARLY:
        gpu.gdc_wait()


@jit
def let_next_start(EARLY: tl.constexpr):
    """Only after ``wait_for_last``. Early, if the next kernel is short; late, if it would prefetch more than fits."""
    if EARLY:
        gpu.gdc_launch_dependents()


@jit
def fetch_ahead(pointers):
    """Prefetch these addresses into the second-level cache. Only for memory that no kernel writes: weights."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def is_available() -> bool:
    return triton is not None


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


_counts: dict[tuple[torch.device, int], list[Tensor]] = {}


def arrival_counts(device: torch.device, num_counts: int) -> Tensor:
    """Zeros with which programs of one launch find out which of them is the last to finish.

    The last one clears its count, so they are zero again when the launch ends, and all kernels of one stream share
    them. Outgrown ones are kept, since captured graphs still use them.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    made = _counts.setdefault((device, stream), [])
    if not made or made[-1].shape[0] < num_counts:
        made.append(torch.zeros(max(num_counts, 1 << 14), dtype=torch.int32, device=device))
    return made[-1]
