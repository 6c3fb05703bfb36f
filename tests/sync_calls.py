"""Calls that make the host wait for a GPU, and calls like them that do not. One table for the simulator and for CUDA.

`tests/device/test_sync_calls.py` holds the simulated device to it, `tests/gpu/test_sync_guard.py` a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """All on the device, made beforehand."""

    x: Tensor  # [4, 6] float32
    square: Tensor  # [4, 4] float32, well conditioned
    ints: Tensor  # [4] int64, small and positive
    mask: Tensor  # [4, 6] bool
    counts: Tensor  # [4] int32


def make_inputs(device: torch.device) -> Inputs:
    x = torch.linspace(-1.0, 1.0, 24).view(4, 6)
    ints = torch.tensor([2, 0, 3, 1])
    square = torch.eye(4) * 3 + 0.1
    return Inputs(*(t.to(device) for t in (x, square, ints, x > 0, ints.int())))


Call = Callable[[Inputs], object]

WAITS: dict[str, Call] = {
    "item": lambda i: i.x[0, 0].item(),
    "float": lambda i: float(i.x[0, 0]),
    "int": lambda i: int(i.ints[0]),
    "bool": lambda i: bool(i.x[0, 0] > 0),
    "tolist": lambda i: i.ints.tolist(),
    "cpu": lambda i: i.x.cpu(),
    "to cpu": lambda i: i.x.to("cpu"),
    "nonzero": lambda i: i.mask.nonzero(),
    "where of one argument": lambda i: torch.where(i.mask),
    "mask index": lambda i: i.x[i.mask],
    "masked_select": lambda i: i.x.masked_select(i.mask),
    "mask assignment of a tensor": lambda i: i.x.clone().__setitem__(i.mask, i.x[0, :1].expand(12).clone()),
    "repeat_interleave without a size": lambda i: torch.repeat_interleave(i.counts),
    "repeat_interleave of a tensor without a size": lambda i: i.x.repeat_interleave(i.ints, dim=0),
    "unique": lambda i: i.ints.unique(),
    "unique_consecutive": lambda i: i.ints.unique_consecutive(),
    "equal": lambda i: torch.equal(i.x, i.x + 0),
    "bincount": lambda i: torch.bincount(i.ints),
    "list index": lambda i: i.x[[0, 1]],
    "host tensor index": lambda i: i.x[torch.tensor([0, 1])],
    "tensor from a list": lambda i: torch.tensor([1.0, 2.0], device=i.x.device),
    "copy from pageable memory": lambda i: i.x[0].copy_(torch.ones(6)),
    "slice by a device number": lambda i: i.x[: i.ints[1]],
}

DOES_NOT_WAIT: dict[str, Call] = {
    "add": lambda i: i.x + 1,
    "host number": lambda i: i.x * torch.tensor(2.0),
    "int index": lambda i: i.x[i.ints],
    "index_select": lambda i: i.x.index_select(0, i.ints),
    "index assignment": lambda i: i.x.clone().__setitem__(i.ints, i.x),
    "mask assignment of a number": lambda i: i.x.clone().__setitem__(i.mask, 0.0),
    "masked_fill": lambda i: i.x.masked_fill(i.mask, 0.0),
    "where": lambda i: torch.where(i.mask, i.x, 0.0),
    "repeat_interleave with a size": lambda i: torch.repeat_interleave(i.ints, output_size=6),
    "cumsum": lambda i: i.x.cumsum(0),
    "sort": lambda i: i.x.sort(dim=1),
    "topk": lambda i: i.x.topk(2),
    "argmax": lambda i: i.x.argmax(1),
    "softmax": lambda i: i.x.softmax(1),
    "matmul": lambda i: i.x @ i.x.T,
    "linear": lambda i: torch.nn.functional.linear(i.x, i.x),
    "scatter": lambda i: torch.zeros_like(i.x).scatter_(1, i.ints.unsqueeze(1), 1.0),
    "index_add": lambda i: i.x.clone().index_add_(0, i.ints, i.x),
    "gather": lambda i: i.x.gather(1, i.ints.unsqueeze(1)),
    "arange": lambda i: torch.arange(5, device=i.x.device),
    "full": lambda i: torch.full((3,), 2.0, device=i.x.device),
    "cat": lambda i: torch.cat([i.x, i.x]),
    "isin": lambda i: torch.isin(i.ints, i.ints),
    "searchsorted": lambda i: torch.searchsorted(i.x[0], i.x[1]),
    "multinomial": lambda i: i.x.softmax(1).multinomial(1),
    "histc": lambda i: i.x.histc(4, -1, 1),
    "cholesky_ex": lambda i: torch.linalg.cholesky_ex(i.square @ i.square.T),
    "inv_ex": lambda i: torch.linalg.inv_ex(i.square),
    "solve_ex": lambda i: torch.linalg.solve_ex(i.square, i.x),
    "masked_scatter": lambda i: i.x.masked_scatter(i.mask, i.x),
    "any": lambda i: i.mask.any(),
    "one_hot with a size": lambda i: torch.nn.functional.one_hot(i.ints, 5),
}
