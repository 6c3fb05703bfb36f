"""Matrix product with a stored weight, and the memory layout in which a CPU multiplies with it fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation

# Above this size a weight streams from memory whatever its layout, and oneDNN's blocked one scales best with the number
# of tokens; below it, oneDNN's overhead per call shows, and a transposed weight is best (docs/log.md). A rule, not a
# measurement at start-up: the same model must round the same way after every restart.
_BLOCKED_BYTES = 16 * 2**20


def pack(weight: Tensor) -> Tensor:
    """The same matrix [out, in] in a layout for this CPU. ``linear`` takes it in place of the original."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    if weight.nbytes >= _BLOCKED_BYTES and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 4)
        return packed
    return weight.t().contiguous().t()


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> TensorSpec:
    return TensorSpec((*x.shape[:-1], weight.shape[0]), x.dtype)


@operation(_shape)
def linear(
    x: Tensor,  # [num_tokens, in]
    weight: Tensor,  # [out, in], as stored or as `pack` made it
    bias: Tensor | None,  # [out]
) -> Tensor:  # [num_tokens, out]
    if weight.layout == torch._mkldnn:  # type: ignore[attr-defined]
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def _embedding_shape(weight: Tensor, token_ids: Tensor) -> TensorSpec:
    return TensorSpec((token_ids.shape[0], weight.shape[1]), weight.dtype)


@operation(_embedding_shape)
def embedding(
    weight: Tensor,  # [vocab, hidden]
    token_ids: Tensor,  # [num_tokens] int32
) -> Tensor:  # [num_tokens, hidden]
    return torch.index_select(weight, 0, token_ids)
