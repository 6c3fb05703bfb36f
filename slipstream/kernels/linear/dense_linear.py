"""Matrix product with a stored weight, and the memory layout that is fastest on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels import native
from slipstream.kernels.linear.small_linear import Epilogue, small_linear
from slipstream.kernels.native.records import CACHED_KINDS
from slipstream.kernels.tuning.tiles import head_tile


class PackedWeight(NamedTuple):
    """A matrix [out, in] split into panels of neighbouring outputs, the last one padded with zeros."""

    panels: Tensor  # [num_panels, in, panel width] float32, or of 16 bits that hold the same numbers
    out_size: int
    # Half of a panel gates the other half: the product is silu(gate) * up, of half the size.
    gated: bool = False


def panel_width(device: torch.device, dtype: torch.dtype) -> int | None:
    """Outputs per panel, where a kernel reads such weights."""
    if device.type != "cpu":
        return None
    lib = native.usable(torch.empty(0, dtype=dtype, device="cpu"))
    return None if lib is None else int(lib.slip_panel_width())


def cut_panels(weight: Tensor, width: int, gated: bool = False) -> PackedWeight:
    """``weight`` is [out, in]; if gated [2 * out, in], gates first, for one product fused with ``swiglu``."""
    # One path for both: joining tensors on the meta device, to plan memory, would import torch's compiler (0.5 s).
    parts = 2 if gated else 1
    out_size, in_size = weight.shape[0] // parts, weight.shape[1]
    rows = width // parts
    num_panels = -(-out_size // rows)
    padded = F.pad(weight.view(parts, out_size, in_size), (0, 0, 0, num_panels * rows - out_size))
    panels = padded.view(parts, num_panels, rows, in_size).permute(1, 3, 0, 2).reshape(num_panels, in_size, width)
    return PackedWeight(panels.contiguous(), out_size, gated)


def narrow_exactly(numbers: Tensor) -> Tensor:
    """The same numbers in 16 bits, if none changes: most checkpoints have no more, and half of the memory is read."""
    if numbers.device.type == "cpu":
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal((narrow := numbers.to(dtype)).to(numbers.dtype), numbers):
                return narrow
    return numbers


@operation(lambda x, weight: TensorSpec((*x.shape[:-1], weight.shape[0]), x.dtype))
def linear(
    x: Tensor,  # [num_tokens, in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
) -> Tensor:  # [num_tokens, out]
    return F.linear(x, weight, bias)


@operation(lambda x, out_size: TensorSpec((x.shape[0], out_size), x.dtype))
def panel_linear(
    x: Tensor,  # [num_tokens, in] float32; rows may overlap or lie apart
    panels: Tensor,  # [num_panels, in, panel width], from cut_panels; of 16 bits after narrow_exactly
    bias: Tensor | None,  # [out], without gates only
    out_size: int,
    gated: bool,
) -> Tensor:  # [num_tokens, out]
    """``linear``, followed by ``swiglu`` if gated, by the C kernel.

    A token's result does not depend on how many tokens are computed with it.
    """
    lib = native.library()
    assert lib is not None
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, in_size = x.shape
    out = torch.empty(num_tokens, out_size)
    shift = None if bias is None else bias.data_ptr()
    weights = (panels.data_ptr(), CACHED_KINDS[panels.dtype])
    arrays = (x.data_ptr(), x.stride(0), *weights, shift, out.data_ptr())
    lib.slip_panel_linear(*arrays, num_tokens, in_size, out_size, gated, torch.get_num_threads())
    return out


@operation(lambda x, weight: TensorSpec((x.shape[0], weight.shape[0]), torch.promote_types(x.dtype, torch.float32)))
def head_logits(
    x: Tensor,  # [n, hidden]
    weight: Tensor,  # [vocab, hidden]
) -> Tensor:  # [n, vocab], in float32 at least
    """A product whose sums are not rounded to 16 bits, where neighbouring logits would be an eighth apart."""
    if x.is_cuda and x.dtype != torch.float32:
        if (tile := head_tile(x, weight.shape[0])) is not None:
            return small_linear(x, weight, Epilogue(), tile, torch.float32).out
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32))


@operation(lambda weight, token_ids: TensorSpec((token_ids.shape[0], weight.shape[1]), weight.dtype))
def embedding(
    weight: Tensor,  # [vocab, hidden]
    token_ids: Tensor,  # [num_tokens] int32
) -> Tensor:  # [num_tokens, hidden]
    return torch.index_select(weight, 0, token_ids)
