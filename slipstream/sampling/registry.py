"""The sampling operations, in the order of the sampler: every file of this package that has an ``OPERATION``, and those
that are registered by programs.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterable

from slipstream.errors import ConfigError, RequestError
from slipstream.parameters import Parameter, register_parameter
from slipstream.request import Request
from slipstream.sampling.operation import SamplingOperation
from slipstream.sampling_params import PARAMETERS

registered: dict[str, SamplingOperation] = {}


def register(operation: SamplingOperation) -> None:
    """Register an operation for engines that are built from now on, and its parameters for requests."""
    if registered.get(operation.name, operation) is not operation or operation.name in {o.name for o in packaged()}:
        raise ValueError(f"two sampling operations are called {operation.name}")
    _declare_parameters(operation)
    registered[operation.name] = operation


def modules() -> tuple[str, ...]:
    """Modules that an engine's own process imports, so that the operations registered here exist there."""
    names = {operation.apply.__module__: operation for operation in registered.values()}
    return tuple(name for name, own in names.items() if getattr(sys.modules.get(name), "OPERATION", None) is own)


def register_modules(names: Iterable[str]) -> None:
    for name in names:
        try:
            register(importlib.import_module(name).OPERATION)
        except ImportError as error:
            raise ConfigError(
                f"the engine's process cannot import the sampling operation in {name} ({error}); "
                "put its folder into PYTHONPATH"
            ) from error


def operations() -> tuple[SamplingOperation, ...]:
    return in_order((*packaged(), *registered.values()))


@functools.cache
def packaged() -> tuple[SamplingOperation, ...]:
    """The operations of the package."""
    found = []
    package = __name__.rpartition(".")[0]
    for module in sorted(pkgutil.iter_modules(importlib.import_module(package).__path__)):
        declared = getattr(importlib.import_module(f"{package}.{module.name}"), "OPERATION", None)
        if declared is not None:
            assert isinstance(declared, SamplingOperation)
            _declare_parameters(declared)
            found.append(declared)
    return tuple(found)


def in_order(given: Iterable[SamplingOperation]) -> tuple[SamplingOperation, ...]:
    """Sorted by stage, and within a stage by the ``after`` of each operation."""
    waiting, placed = sorted(given, key=lambda operation: operation.stage), list[SamplingOperation]()
    while waiting:
        names = {operation.name for operation in waiting if operation.stage == waiting[0].stage}
        ready = [o for o in waiting if o.name in names and not names.intersection(o.after)]
        if not ready:
            raise ValueError(f"sampling operations come after each other: {', '.join(sorted(names))}")
        waiting.remove(ready[0])
        placed.append(ready[0])
    return tuple(placed)


def check_request(request: Request, vocab_size: int) -> None:
    """Checks that only operations can make on a request."""
    for operation in operations():
        operation.check(request, vocab_size)


def refuse_unknown(request: Request, known: Iterable[SamplingOperation], of_model: Iterable[Parameter] = ()) -> None:
    """Refuse parameters of an operation that was registered after the engine was built."""
    names = {declared.name for operation in known for declared in operation.parameters}
    names.update(declared.name for declared in of_model)
    for name in request.params.extra:
        if name not in names:
            raise RequestError(
                f"this engine has no sampling parameter '{name}'; register its operation before the engine is built"
            )


def _declare_parameters(operation: SamplingOperation) -> None:
    for declared in operation.parameters:
        if declared.name not in PARAMETERS:
            register_parameter(declared)
