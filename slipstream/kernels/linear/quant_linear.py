"""Matrix products with quantised weights on a CPU, and rows of such matrices."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.config import activation_bits
from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels import native
from slipstream.kernels.linear.quant_weights import QuantMatrix, dequantised


def default_planes() -> int:
    """How activations meet quantised weights, if the user does not say it: as the figures in docs/models.md decided.

    2: as 16 bits of fixed point a block of 32, and 24 in blocks with outliers, where instructions multiply bytes; the
    results are equal to the bit on all such CPUs. 0: as they are, elsewhere. 3: as 24 bits, the accuracy of float32.
    """
    if (bits := activation_bits()) is not None:
        return {32: 0, 24: 3, 16: 2}[bits]
    lib = native.library()
    return 2 if lib is not None and lib.slip_has_byte_products() else 0


def _linear_shape(x: Tensor, matrix: QuantMatrix, bias: Tensor | None, planes: int) -> TensorSpec:
    return TensorSpec((x.shape[0], matrix.out_size), x.dtype)


@operation(_linear_shape)
def quant_linear(
    x: Tensor,  # [num_tokens, in] float32
    matrix: QuantMatrix,
    bias: Tensor | None,  # [out], without gates only
    planes: int,  # of activations: 0, 2 or 3, see default_planes
) -> Tensor:  # [num_tokens, out]
    """``linear``, and ``swiglu`` after it where gated.

    A token's result depends neither on how many are computed with it nor on the number of threads.
    """
    if (lib := native.library()) is None:
        out = F.linear(x, dequantised(matrix))
        if matrix.gated:
            gate, up = out.chunk(2, dim=1)
            return F.silu(gate) * up
        return out if bias is None else out + bias
    x = x.contiguous()
    num_tokens, in_size = x.shape
    assert x.dtype is torch.float32
    assert in_size == matrix.in_size
    out = torch.empty(num_tokens, matrix.out_size)
    shift = None if bias is None else bias.data_ptr()
    arrays = (ctypes.addressof(matrix.record), x.data_ptr(), shift, out.data_ptr())
    if lib.slip_product(*arrays, num_tokens, planes, torch.get_num_threads()):
        raise MemoryError("no memory for the activations of a product")
    return out


def _embedding_shape(token_ids: Tensor, matrix: QuantMatrix) -> TensorSpec:
    return TensorSpec((token_ids.shape[0], matrix.in_size), torch.float32)


@operation(_embedding_shape)
def quant_embedding(
    token_ids: Tensor,  # [num_tokens] int32
    matrix: QuantMatrix,  # [vocab, hidden], of one segment: it may be the output matrix, too
) -> Tensor:  # [num_tokens, hidden] float32
    """Rows of a quantised matrix, dequantised."""
    if (lib := native.library()) is None:
        return torch.index_select(dequantised(matrix), 0, token_ids)
    assert len(matrix.segments) == 1
    token_ids = token_ids.to(torch.int32).contiguous()
    out = torch.empty(token_ids.shape[0], matrix.in_size)
    arrays = (ctypes.addressof(matrix.record), token_ids.data_ptr(), token_ids.shape[0], out.data_ptr())
    if lib.slip_quant_rows(*arrays, torch.get_num_threads()):
        raise IndexError("a token id is no row of the embedding")
    return out
