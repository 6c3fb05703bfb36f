"""Torch calls that the simulated device must answer as a CPU does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_draw = torch.Generator().manual_seed(7)
_OPERANDS = {
    "x": torch.randn(3, 4, generator=_draw),
    "y": torch.rand(3, 4, generator=_draw) + 0.5,
    "v": torch.randn(4, generator=_draw),
    "w": torch.randn(5, 4, generator=_draw),
    "b": torch.randn(5, generator=_draw),
    "cube": torch.randn(2, 3, 4, generator=_draw),
    "half": torch.randn(3, 4, generator=_draw).bfloat16(),
    "n": torch.randint(-5, 9, (3, 4), generator=_draw, dtype=torch.int32),
    "i": torch.tensor([2, 0, 1, 1, 0, 2]),  # row numbers of x
    "j": torch.tensor([3, 0, 1, 2, 3, 0]),  # column numbers of x
    "columns": torch.tensor([[0, 3], [2, 1], [1, 0]]),  # column numbers of x, distinct in every row
    "mask": torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool),
    "row_mask": torch.tensor([True, False, True]),
    "counts": torch.tensor([1, 3, 2]),
    "nothing": torch.empty(0, 4),
    "s": torch.tensor(1.5),
}


class Operands:
    """The tensors that a call asks for, brought to a device when it does."""

    def __init__(self, device: torch.device, bring: Callable[[Tensor], Tensor]) -> None:
        self.device = device
        self._bring = bring
        self.used: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Tensor:
        if name not in self.used:
            self.used[name] = self._bring(_OPERANDS[name])
        return self.used[name]


Call = Callable[[Operands], Any]


def _set(target: Tensor, index: Any, value: Any) -> Tensor:
    target[index] = value
    return target


def _by_statement(target: Tensor, statement: str, **names: Any) -> Tensor:
    """For statements that a lambda cannot hold."""
    exec(statement, {"x": target, **names})
    return target


VIEWS: dict[str, Call] = {
    "view": lambda t: t.x.view(2, 6),
    "view to another type of the same size": lambda t: t.x.view(torch.int32),
    "view to a smaller type": lambda t: t.x.view(torch.int16),
    "view to a larger type": lambda t: t.n.view(torch.int64),
    "view of a slice to another type": lambda t: t.x[1:].view(torch.int32) + 1,
    "view of a slice to a smaller type": lambda t: t.x[2].view(torch.uint8) + 1,
    "view_as": lambda t: t.x.view_as(t.y),
    "reshape without a copy": lambda t: t.cube.reshape(6, 4),
    "reshape with a copy": lambda t: t.x.t().reshape(-1),
    "reshape of a strided slice": lambda t: t.x[:, 1:3].reshape(6),
    "flatten": lambda t: t.cube.flatten(1),
    "flatten with a copy": lambda t: t.cube.transpose(0, 2).flatten(),
    "unflatten": lambda t: t.x.unflatten(1, (2, 2)),
    "ravel": lambda t: t.x.ravel(),
    "t": lambda t: t.x.t(),
    "T": lambda t: t.x.T + 1,
    "mT": lambda t: t.cube.mT,
    "transpose": lambda t: t.cube.transpose(0, 2),
    "permute": lambda t: t.cube.permute(2, 0, 1),
    "movedim": lambda t: t.cube.movedim(0, 2),
    "expand": lambda t: t.v.expand(3, 4) * 2,
    "expand_as": lambda t: t.v.expand_as(t.cube),
    "broadcast_to": lambda t: torch.broadcast_to(t.v, (2, 4)),
    "squeeze": lambda t: t.x[None, :, None].squeeze(),
    "squeeze of a dimension": lambda t: t.x[None].squeeze(0),
    "unsqueeze": lambda t: t.x.unsqueeze(1),
    "narrow": lambda t: t.x.narrow(1, 1, 2),
    "select": lambda t: t.x.select(0, 1),
    "diagonal": lambda t: t.x.diagonal(),
    "as_strided": lambda t: t.x.as_strided((2, 2), (4, 1), 1),
    "unfold": lambda t: t.v.unfold(0, 2, 1),
    "split": lambda t: t.x.split(2),
    "split into sizes": lambda t: t.x.split([1, 3], dim=1),
    "tensor_split": lambda t: t.x.tensor_split(2, dim=1),
    "chunk": lambda t: t.x.chunk(2, dim=1),
    "unbind": lambda t: t.x.unbind(1),
    "iteration": lambda t: list(t.x),
    "detach": lambda t: t.x.detach(),
    "a view of a view": lambda t: t.cube[1].t()[1:3].unsqueeze(0),
    "a view of nothing": lambda t: t.nothing.view(2, 0, 2),
    "swapaxes and slices": lambda t: t.cube.swapaxes(1, 2)[:, ::2, -1],
}
INDEXING: dict[str, Call] = {
    "int": lambda t: t.x[1],
    "negative int": lambda t: t.x[-1, -2],
    "slice": lambda t: t.x[1:, ::2],
    "None and dots": lambda t: t.cube[..., None, 1],
    "empty slice": lambda t: t.x[3:],
    "int tensor": lambda t: t.x[t.i],
    "int tensor on the second dimension": lambda t: t.x[:, t.j],
    "two int tensors": lambda t: t.x[t.i, t.j],
    "int tensors that broadcast": lambda t: t.x[t.i[:3, None], t.j[:2]],
    "int tensor with a slice": lambda t: t.cube[:, t.i, 1:3],
    "int32 tensor": lambda t: t.x[t.i.int()],
    "assignment of a number": lambda t: _set(t.x, 1, 7.0),
    "assignment of a number to an element": lambda t: _set(t.x, (1, 2), 7.0),
    "assignment of a tensor to a slice": lambda t: _set(t.x, slice(1, None), t.y[1:]),
    "assignment that broadcasts": lambda t: _set(t.x, slice(None), t.v),
    "assignment to strided columns": lambda t: _set(t.x, (slice(None), slice(None, None, 2)), t.y[:, :2]),
    "assignment by int tensor": lambda t: _set(t.v, t.columns[0], 3.0),
    "assignment of a tensor by int tensor": lambda t: _set(t.x, t.counts[:1], t.v[None]),
    "assignment of a number by mask": lambda t: _set(t.x, t.mask, 0.0),
    "assignment of a number by mask of rows": lambda t: _set(t.x, t.row_mask, -1.0),
    "assignment of a number to a slice by mask": lambda t: _set(t.x[:2], t.mask[:2], 5.0),
    "index_put": lambda t: t.v.index_put((t.columns[0],), t.s),
    "index_put_": lambda t: t.x.index_put_((t.i[:2], t.j[:2]), t.v[:2]),
    "index_put_ that accumulates": lambda t: t.n.index_put_((t.i, t.j), t.i.int(), accumulate=True),
    "index_select": lambda t: t.x.index_select(0, t.i),
    "index_add_": lambda t: t.n.index_add_(0, t.i[:3], t.n.clone()),
    "index_copy_": lambda t: t.x.index_copy_(0, t.i[:2], t.y[:2]),
    "index_fill_": lambda t: t.x.index_fill_(1, t.j[:2], -3.0),
    "take": lambda t: t.x.take(t.i),
    "take_along_dim": lambda t: t.x.take_along_dim(t.columns, 1),
    "gather": lambda t: t.x.gather(1, t.columns),
    "scatter": lambda t: t.x.scatter(1, t.columns, t.y[:, :2]),
    "scatter_ of a number": lambda t: t.x.scatter_(1, t.columns, 9.0),
    "scatter_add_": lambda t: t.x.scatter_add_(1, t.columns, t.y),
    "scatter_reduce_": lambda t: t.x.scatter_reduce_(1, t.columns, t.y, "amax"),
    "masked_fill": lambda t: t.x.masked_fill(t.mask, float("-inf")),
    "masked_fill_": lambda t: t.x.masked_fill_(t.mask, 2.0),
    "masked_fill_ with a tensor": lambda t: t.x.masked_fill_(t.mask, t.s),
    "where": lambda t: torch.where(t.mask, t.x, t.y),
    "where with a number": lambda t: torch.where(t.mask, t.x, 0.0),
    "embedding": lambda t: F.embedding(t.i, t.w),
    "one_hot": lambda t: F.one_hot(t.i, 3),
}
IN_PLACE: dict[str, Call] = {
    "add_": lambda t: t.x.add_(t.y, alpha=2),
    "add_ that broadcasts": lambda t: t.x.add_(t.v),
    "+=": lambda t: _by_statement(t.x, "x += 1"),
    "*= of a slice": lambda t: _by_statement(t.x, "x[1:] *= v", v=t.v),
    "//=": lambda t: _by_statement(t.n, "x //= 2"),
    "<<=": lambda t: _by_statement(t.n, "x <<= 1"),
    "|=": lambda t: _by_statement(t.mask, "x |= m", m=t.mask.roll(1)),
    "mul_ of a view": lambda t: t.x.t().mul_(t.s),
    "a view sees a change of its base": lambda t: (t.x[1], t.x.mul_(2)),
    "a base sees a change of its view": lambda t: (t.x, t.x[1].fill_(0)),
    "copy_": lambda t: t.x.copy_(t.y),
    "copy_ that broadcasts": lambda t: t.x.copy_(t.v),
    "copy_ that converts": lambda t: t.n.copy_(t.x),
    "copy_ to a transposed view": lambda t: t.x.t().copy_(t.y.t()),
    "fill_": lambda t: t.x.fill_(3),
    "fill_ with a tensor": lambda t: t.x.fill_(t.s),
    "zero_": lambda t: t.x[:, 1].zero_(),
    "clamp_": lambda t: t.x.clamp_(-0.5, 0.5),
    "relu_": lambda t: t.x.relu_(),
    "sub_ of an int": lambda t: t.n.sub_(1),
    "div_": lambda t: t.x.div_(t.y),
    "neg_": lambda t: t.x.neg_(),
    "exp_": lambda t: t.x.exp_(),
    "lerp_": lambda t: t.x.lerp_(t.y, 0.25),
    "addcmul_": lambda t: t.x.addcmul_(t.y, t.y, value=0.5),
    "addmm_": lambda t: t.x.addmm_(t.x[:, :3].clone(), t.y),
    "cumsum_": lambda t: t.x.cumsum_(0),
    "tril_": lambda t: t.x.tril_(),
    "logical_not_": lambda t: t.mask.logical_not_(),
    "eq_": lambda t: t.x.eq_(t.x.clone()),
    "squeeze_": lambda t: t.x[None].squeeze_(0),
    "unsqueeze_": lambda t: t.x.unsqueeze_(1),
    "t_": lambda t: t.x.t_(),
    "t_ and back": lambda t: t.x.t_().mul_(2).t_(),
    "transpose_": lambda t: t.cube.transpose_(0, 2),
    "t_ of a slice": lambda t: t.x[:, 1:3].t_(),
    "a change after unsqueeze_": lambda t: (t.x.unsqueeze_(0).add_(1), t.x[0, 1]),
    "swapdims_": lambda t: t.cube.swapdims_(1, 2),
    "as_strided_": lambda t: t.x.as_strided_((2, 3), (4, 1)),
    "foreach": lambda t: (torch._foreach_mul_([t.x, t.y], 2.0), t.x, t.y)[1:],
}
WITH_OUT: dict[str, Call] = {
    "add": lambda t: torch.add(t.x, t.y, out=t.x),
    "add into a slice": lambda t: torch.add(t.v, 1, out=t.x[1]),
    "add into nothing": lambda t: torch.add(t.x, 1, out=torch.empty(0, device=t.device)),
    "mul of ints into floats": lambda t: torch.mul(t.n, 2, out=torch.zeros(3, 4, device=t.device)),
    "matmul": lambda t: torch.matmul(t.x, t.w.t(), out=torch.empty(3, 5, device=t.device)),
    "mm": lambda t: torch.mm(t.x, t.w.t(), out=torch.empty(0, device=t.device)),
    "cat": lambda t: torch.cat([t.x, t.y], out=torch.empty(6, 4, device=t.device)),
    "stack": lambda t: torch.stack([t.x, t.y], out=torch.empty(2, 3, 4, device=t.device)),
    "sum": lambda t: torch.sum(t.x, 1, out=torch.empty(3, device=t.device)),
    "cumsum": lambda t: torch.cumsum(t.x, 1, out=torch.empty(3, 4, device=t.device)),
    "index_select": lambda t: torch.index_select(t.x, 0, t.i, out=torch.empty(6, 4, device=t.device)),
    "gather": lambda t: torch.gather(t.x, 1, t.columns, out=t.y[:, :2]),
    "where": lambda t: torch.where(t.mask, t.x, t.y, out=t.y),
    "arange": lambda t: torch.arange(4, out=torch.empty(4, dtype=torch.int64, device=t.device)),
    "sort": lambda t: torch.sort(
        t.x, 1, out=(torch.empty_like(t.x), torch.empty(3, 4, dtype=torch.int64, device=t.device))
    ),
    "max along a dimension": lambda t: torch.max(
        t.x, 1, out=(torch.empty(0, device=t.device), torch.empty(0, dtype=torch.int64, device=t.device))
    ),
    "topk": lambda t: torch.topk(
        t.x, 2, out=(torch.empty(3, 2, device=t.device), torch.empty(3, 2, dtype=torch.int64, device=t.device))
    ),
    "two results of different shapes": lambda t: torch.linalg.qr(
        t.x, out=(torch.empty(3, 3, device=t.device), torch.empty(3, 4, device=t.device))
    ),
    "exp": lambda t: torch.exp(t.x, out=t.x),
    "clamp": lambda t: torch.clamp(t.x, 0, 1, out=t.y),
    "softmax": lambda t: torch.softmax(t.x, 1, out=torch.empty(3, 4, device=t.device)),
}
JOINING: dict[str, Call] = {
    "cat": lambda t: torch.cat([t.x, t.y[:1]]),
    "cat along columns": lambda t: torch.cat([t.x, t.y], dim=1),
    "cat with nothing": lambda t: torch.cat([t.nothing, t.x]),
    "cat that promotes": lambda t: torch.cat([t.x, t.n]),
    "stack": lambda t: torch.stack([t.x, t.y], dim=2),
    "hstack": lambda t: torch.hstack([t.x, t.y]),
    "repeat": lambda t: t.v.repeat(2, 3),
    "tile": lambda t: t.v.tile(2),
    "repeat_interleave by a number": lambda t: t.x.repeat_interleave(2, dim=0),
    "repeat_interleave": lambda t: t.x.repeat_interleave(t.counts, dim=0, output_size=6),
    "repeat_interleave of counts": lambda t: torch.repeat_interleave(t.counts, output_size=6),
    "flip": lambda t: t.x.flip(0, 1),
    "roll": lambda t: t.x.roll(1, 1),
    "pad": lambda t: F.pad(t.x, (1, 2), value=3.0),
    "meshgrid": lambda t: torch.meshgrid(t.v, t.b, indexing="ij"),
    "tril": lambda t: t.x.tril(),
    "diag": lambda t: t.v.diag(),
    "clone": lambda t: t.x.clone(),
    "clone of a transposed view": lambda t: t.x.t().clone(),
    "contiguous": lambda t: t.x.t().contiguous(),
    "contiguous already": lambda t: t.x.contiguous(),
}
COMPUTING: dict[str, Call] = {
    "sum of a tensor and a number": lambda t: t.x + 1,
    "sum of bools and a bool": lambda t: t.mask + True,
    "sum of bools and an int": lambda t: t.mask + 1,
    "sum of bools and a float": lambda t: t.mask + 1.0,
    "number first": lambda t: 2 - t.x,
    "ints and floats": lambda t: t.n * t.x,
    "broadcasting": lambda t: t.cube * t.x + t.v,
    "a scalar tensor": lambda t: t.x * t.s,
    "a scalar tensor of the host": lambda t: t.x * torch.tensor(3.0),
    "a large scalar tensor of the host": lambda t: t.half * torch.tensor(3.0, dtype=torch.float64),
    "division of ints": lambda t: t.n / 3,
    "floor division": lambda t: t.n // 3,
    "remainder": lambda t: t.n % 4,
    "power": lambda t: t.y**2.5,
    "power of a number": lambda t: 2**t.x,
    "comparison": lambda t: (t.x > t.y) | (t.n == 1),
    "negated mask": lambda t: ~t.mask,
    "shifts": lambda t: (t.n << 3) >> 1,
    "bitwise": lambda t: (t.n & 3) ^ 5,
    "minimum": lambda t: torch.minimum(t.x, t.y),
    "clamp": lambda t: t.x.clamp(min=0.1),
    "clamp by a tensor": lambda t: t.x.clamp(max=t.v),
    "abs": lambda t: t.x.abs(),
    "rsqrt": lambda t: t.y.rsqrt(),
    "sigmoid": lambda t: t.x.sigmoid(),
    "silu": lambda t: F.silu(t.x),
    "gelu": lambda t: F.gelu(t.x, approximate="tanh"),
    "isnan": lambda t: (t.x / 0 * 0).isnan(),
    "nan_to_num": lambda t: (t.x / 0 * 0).nan_to_num(2.0),
    "sum": lambda t: t.x.sum(),
    "sum along a dimension": lambda t: t.x.sum(1, keepdim=True),
    "mean": lambda t: t.x.mean(-1),
    "var": lambda t: t.x.var(1),
    "any": lambda t: t.mask.any(1),
    "all": lambda t: t.mask.all(),
    "argmax": lambda t: t.x.argmax(-1),
    "max along a dimension": lambda t: t.x.max(1),
    "amax": lambda t: t.x.amax(0),
    "aminmax": lambda t: t.x.aminmax(dim=1),
    "logsumexp": lambda t: t.x.logsumexp(1),
    "cumsum": lambda t: t.x.cumsum(1),
    "cumsum of ints": lambda t: t.n.cumsum(0),
    "cumsum of bools": lambda t: t.mask.cumsum(1),
    "cumprod": lambda t: t.x.cumprod(0),
    "cummax": lambda t: t.x.cummax(1),
    "sort": lambda t: t.x.sort(1, descending=True),
    "sort that is stable": lambda t: t.n.sort(stable=True),
    "argsort": lambda t: t.x.argsort(),
    "topk": lambda t: t.x.topk(2),
    "searchsorted": lambda t: torch.searchsorted(t.v.sort().values, t.b),
    "isin": lambda t: torch.isin(t.i, t.counts),
    "softmax": lambda t: t.x.softmax(-1),
    "softmax of another type": lambda t: F.softmax(t.half, -1, dtype=torch.float32),
    "log_softmax": lambda t: t.x.log_softmax(1),
    "matmul": lambda t: t.x @ t.w.t(),
    "matmul of a batch": lambda t: t.cube @ t.w.t(),
    "matmul with a vector": lambda t: t.x @ t.v,
    "bmm": lambda t: torch.bmm(t.cube, t.cube.mT),
    "addmm": lambda t: torch.addmm(t.b, t.x, t.w.t()),
    "linear": lambda t: F.linear(t.x, t.w, t.b),
    "linear of a batch": lambda t: F.linear(t.cube, t.w),
    "linear in 16 bits": lambda t: F.linear(t.x.half(), t.w.half()),
    "einsum": lambda t: torch.einsum("bij,kj->bik", t.cube, t.w),
    "einsum with a sum": lambda t: torch.einsum("ij,ij->i", t.x, t.y),
    "outer": lambda t: torch.outer(t.v, t.b),
    "layer_norm": lambda t: F.layer_norm(t.x, (4,), t.v, t.v),
    "rms_norm": lambda t: F.rms_norm(t.x, (4,), t.v),
    "attention": lambda t: F.scaled_dot_product_attention(t.cube, t.cube, t.cube, is_causal=True),
    "conv1d": lambda t: F.conv1d(t.cube, t.cube.new_ones(2, 3, 2)),
    "cross_entropy": lambda t: F.cross_entropy(t.x, t.i[:3]),
    "norm": lambda t: t.x.norm(dim=1),
    "dot": lambda t: t.v.dot(t.v),
    "count_nonzero": lambda t: t.n.count_nonzero(1),
    "lerp": lambda t: t.x.lerp(t.y, t.s),
    "foreach": lambda t: torch._foreach_add([t.x, t.y], 1.0),
    "nothing": lambda t: t.nothing + 1,
    "sum of nothing": lambda t: t.nothing.sum(0),
    "a long chain": lambda t: ((t.x * 2 + t.v).relu() @ t.w.t() + t.b).softmax(-1).cumsum(1),
}
CONVERSIONS: dict[str, Call] = {
    "to a type": lambda t: t.x.to(torch.float64),
    "to the same type": lambda t: t.x.to(torch.float32),
    "to the same type, copied": lambda t: t.x.to(torch.float32, copy=True),
    "to the device": lambda t: t.x.to(t.device),
    "to the type of another": lambda t: t.n.to(t.x),
    "to the device and a type": lambda t: t.x.to(t.device, torch.int64),
    "to a type, not blocking": lambda t: t.x.to(torch.int32, non_blocking=True),
    "float of bfloat16": lambda t: t.half.float(),
    "bfloat16": lambda t: t.x.bfloat16(),
    "half": lambda t: t.x.half(),
    "double": lambda t: t.x.double(),
    "int": lambda t: (t.x * 10).int(),
    "long": lambda t: t.n.long(),
    "bool": lambda t: t.n.bool(),
    "int8": lambda t: t.n.to(torch.int8),
    "float8": lambda t: t.x.to(torch.float8_e4m3fn).float(),
    "type_as": lambda t: t.n.type_as(t.x),
    "transposed and converted": lambda t: t.x.t().double(),
    "bits there and back": lambda t: (t.x.view(torch.int32) ^ -(2**31)).view(torch.float32),
    "int of a mask": lambda t: t.mask.int(),
}
FACTORIES: dict[str, Call] = {
    "zeros": lambda t: torch.zeros(2, 3, device=t.device),
    "zeros of a type": lambda t: torch.zeros(3, dtype=torch.int32, device=t.device),
    "ones": lambda t: torch.ones(3, dtype=torch.bool, device=t.device),
    "full": lambda t: torch.full((2, 2), 7, device=t.device),
    "full of a scalar": lambda t: torch.full((), 2.5, device=t.device),
    "arange": lambda t: torch.arange(5, device=t.device),
    "arange with start and step": lambda t: torch.arange(2, 11, 3, device=t.device, dtype=torch.int32),
    "arange of floats": lambda t: torch.arange(0.0, 1.0, 0.25, device=t.device),
    "a longer arange of floats": lambda t: torch.arange(0.0, 3.0, 0.25, device=t.device),
    "linspace": lambda t: torch.linspace(0, 1, 5, device=t.device),
    "rand": lambda t: torch.rand(5, device=t.device, generator=torch.Generator().manual_seed(3)),
    "eye": lambda t: torch.eye(3, device=t.device),
    "scalar_tensor": lambda t: torch.scalar_tensor(3.0, device=t.device),
    "zeros_like": lambda t: torch.zeros_like(t.x),
    "zeros_like of another type": lambda t: torch.zeros_like(t.x, dtype=torch.int64),
    "ones_like": lambda t: torch.ones_like(t.n),
    "full_like": lambda t: torch.full_like(t.x.t(), 3.0),
    "empty_like": lambda t: torch.empty_like(t.x).fill_(1),
    "empty_like of a transposed view": lambda t: torch.empty_like(t.x.t()).copy_(t.x.t()),
    "empty_strided": lambda t: torch.empty_strided((2, 3), (1, 2), device=t.device).zero_(),
    "new_zeros": lambda t: t.x.new_zeros(2),
    "new_ones": lambda t: t.n.new_ones((2, 2)),
    "new_full": lambda t: t.x.new_full((3,), 4.0),
    "new_empty": lambda t: t.x.new_empty(2).zero_(),
    "new_empty_strided": lambda t: t.x.new_empty_strided((2, 3), (1, 2)).zero_(),
    "nothing": lambda t: torch.zeros(0, 3, device=t.device),
    "on the device by context": lambda t: _in_context(t.device),
}


def _in_context(device: torch.device) -> Tensor:
    with device:
        return torch.ones(3) * torch.arange(3)


CALLS = {
    f"{group}: {name}": call
    for group, calls in {
        "views": VIEWS,
        "indexing": INDEXING,
        "in place": IN_PLACE,
        "out": WITH_OUT,
        "joining": JOINING,
        "computing": COMPUTING,
        "conversions": CONVERSIONS,
        "factories": FACTORIES,
    }.items()
    for name, call in calls.items()
}
