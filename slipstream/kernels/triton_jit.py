"""Triton where it can run: on a GPU, or interpreted on a CPU where a test asks for it.

Kernels are written against ``jit`` and ``tl`` from here, so that a machine without Triton can import every kernel file
and take the reference's path.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

triton: Any = None
tl: Any = None
gpu: Any = None
with suppress(ImportError):  # no GPU, or a platform without Triton
    triton, tl = import_module("triton"), import_module("triton.language")
    gpu = import_module("triton.language.extra.cuda")
_background: Any = None
with suppress(ImportError):  # a Triton that compiles one kernel after the other
    _background = import_module("triton.runtime._async_compile")

_interpreted = False
# Of a thread: engines in others go on meanwhile.
_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)
_MOST_COMPILERS = 16


def _kernel(function: Callable[..., None], **options: Any) -> Any:
    if triton is None:
        return function
    if _background is None or triton.knobs.runtime.interpret:
        return triton.jit(**options)(function)
    return _kernel_class()(function, **options)


@functools.cache
def _kernel_class() -> type:
    class Kernel(triton.runtime.JITFunction):  # type: ignore[misc]
        """A kernel that can be told to be compiled and not to run (``compile_ahead``)."""

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return super().run(*args, grid=grid, warmup=warmup or _compiles_only.get(), **kwargs)

        def _do_compile(self, key: Any, signature: Any, device: Any, *rest: Any, **kwargs: Any) -> Any:
            kernel = super()._do_compile(key, signature, device, *rest, **kwargs)
            if _compiles_only.get() and kernel is not None:
                # Asked for again before it is there, it is not looked up by its source a second time.
                self.device_caches[device][0].setdefault(key, kernel)
            return kernel

    return Kernel


def jit(function: Callable[..., None]) -> Any:
    """``triton.jit``, or nothing where there is no Triton."""
    return _kernel(function)


def jit_general(*names: str) -> Callable[[Callable[..., None]], Any]:
    """``jit`` of one kernel for all values of these arguments: Triton makes another one where a number is 1."""
    return lambda function: _kernel(function, do_not_specialize=list(names))


class _Zeroed(TorchFunctionMode):
    """What a kernel would fill is zero instead, and no garbage."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in (torch.empty, torch.empty_like, Tensor.new_empty) else out


class _Blind(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Nothing is looked up by numbers in memory: the kernels that make them do not run, and what stands there is of
    another step, or of a larger batch. Lookups find the first entry; writes by such numbers do not happen.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _WRITES:
            return args[0]
        if func.overloadpacket is aten.repeat_interleave and kwargs.get("output_size") is not None:
            return torch.zeros(kwargs["output_size"], dtype=args[0].dtype, device=args[0].device)
        if func.overloadpacket in _LOOKUPS:
            args = (args[0], *(_firsts(arg) for arg in args[1:]))
        return func(*args, **kwargs)


aten = torch.ops.aten
_LOOKUPS = (aten.index, aten.index_select, aten.embedding, aten.gather, aten.take)
_WRITES = (
    *(aten.index_put_, aten._index_put_impl_, aten.index_copy_, aten.index_add_, aten.index_fill_),
    *(aten.scatter_, aten.scatter_add_),
)


def _firsts(index: Any) -> Any:
    """The same index, with every entry the first."""
    if isinstance(index, list | tuple):
        return [_firsts(one) for one in index]
    is_index = isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64)
    return torch.zeros_like(index) if is_index else index


def num_compilers() -> int:
    """How many kernels are compiled at a time."""
    return max(1, min(_MOST_COMPILERS, os.cpu_count() or 1))


def compiles_ahead(device: torch.device) -> bool:
    return device.type == "cuda" and _background is not None


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Kernels launched inside do not run, and are compiled when the context ends, many at a time."""
    before = _compiles_only.set(True)
    try:
        # By threads: most of a compilation is C++ and another program's, which let Python go on.
        blind = _Blind()  # type: ignore[no-untyped-call]
        with ThreadPoolExecutor(num_compilers()) as pool, _background.AsyncCompileMode(pool), _Zeroed(), blind:
            yield
    finally:
        _compiles_only.reset(before)


def runs_triton(tensor: Tensor) -> bool:
    """Whether an operation on this tensor takes its Triton kernel."""
    return tensor.is_cuda or _interpreted


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
    """Launch options of a kernel that may start while the one before it still runs (``wait_for_last``)."""
    early = tensor.is_cuda and _starts_early(tensor.device)
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})


@jit
def wait_for_last(EARLY: tl.constexpr):
    """Behind this the kernel before has ended.

    A kernel that starts early calls it before it reads or writes anything that the kernel right before may write. What
    came before that one has ended: it has waited itself before it let this one start (``let_next_start``).
    """
    if EARLY:
        gpu.gdc_wait()


@jit
def let_next_start(EARLY: tl.constexpr):
    """Only behind ``wait_for_last``. Early, if the next kernel is short; late, if it would fetch more than is kept."""
    if EARLY:
        gpu.gdc_launch_dependents()


@jit
def fetch_ahead(pointers):
    """Bring the lines of these addresses into the second-level cache. For what no kernel writes: weights."""
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
    """Zeros with which programs of one launch find out who is the last of them.

    The last to arrive clears its count, so they are zero again when the launch ends, and all kernels of one stream
    share them. Outgrown ones are kept: recorded launches go on using them.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    made = _counts.setdefault((device, stream), [])
    if not made or made[-1].shape[0] < num_counts:
        made.append(torch.zeros(max(num_counts, 1 << 14), dtype=torch.int32, device=device))
    return made[-1]
