from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.device.operation import Operation, TensorSpec, all_operations, operation, set_launcher, spec_of


def test_a_device_can_queue_operations() -> None:
    @operation(lambda x: spec_of(x))
    def queued_double(x: Tensor) -> Tensor:
        return x * 2

    queue: list[tuple[Tensor, Operation[Any, Any], Any]] = []

    def launch(op: Operation[Any, Any], args: Any, kwargs: Any) -> Tensor:
        spec = op.shape(*args, **kwargs)
        assert isinstance(spec, TensorSpec)
        out = torch.full(spec.shape, torch.nan, dtype=spec.dtype)
        queue.append((out, op, args))
        return out

    set_launcher("cpu", launch)
    try:
        out = queued_double(torch.ones(3))
    finally:
        set_launcher("cpu", None)
    assert out.isnan().all(), "nothing has run yet"
    for target, op, args in queue:
        target.copy_(op.body(*args))
    assert out.tolist() == [2.0, 2.0, 2.0]
    assert queued_double(torch.ones(1)).tolist() == [2.0]


def test_names_are_unique() -> None:
    import slipstream.engine.build  # noqa: F401  brings every operation in

    assert {"rms_norm", "paged_attention", "commit", "prepare_inputs"} <= set(all_operations())
    with pytest.raises(ValueError, match="two operations are called rms_norm"):

        @operation(lambda x: spec_of(x))
        def rms_norm(x: Tensor) -> Tensor:
            return x
