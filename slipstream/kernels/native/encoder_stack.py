"""All layers of an encoder in one operation, for CPUs: of one whose norms come before attention and feed-forward.

Layer by layer, tensors as large as the text lie between the products; their memory comes from the system and goes back
to it, a page at a time. Here a few tokens at a time go through everything between two layers' attention.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels import native
from slipstream.kernels.linear.dense_linear import PackedWeight
from slipstream.kernels.native.decoder_stack import matrix_record
from slipstream.kernels.native.records import MatrixRecord, fields

_VECTORS = "attention_norm attention_shift qkv_bias out_bias norm shift up_bias down_bias"
_MATRICES = "qkv out up down"


@dataclass(frozen=True, slots=True)
class EncoderStackLayer:
    """One layer's weights. ``shift`` is what a norm adds."""

    attention_norm: Tensor
    attention_shift: Tensor
    qkv: PackedWeight
    qkv_bias: Tensor
    out: PackedWeight
    out_bias: Tensor
    norm: Tensor
    shift: Tensor
    up: PackedWeight  # gelu follows
    up_bias: Tensor
    down: PackedWeight
    down_bias: Tensor


class _Layer(ctypes.Structure):
    _fields_ = fields(ctypes.c_void_p, _VECTORS) + fields(ctypes.POINTER(MatrixRecord), _MATRICES)


class _Sizes(ctypes.Structure):
    _fields_ = fields(ctypes.c_int64, "hidden heads intermediate") + fields(ctypes.c_float, "eps")


def _layer_record(layer: EncoderStackLayer) -> _Layer:
    vectors = (getattr(layer, name).data_ptr() for name in _VECTORS.split())
    # ctypes keeps what a pointer was made of.
    return _Layer(*vectors, *(ctypes.pointer(matrix_record(getattr(layer, name))) for name in _MATRICES.split()))


@dataclass(slots=True)
class EncoderStack:
    """What is fixed about all layers together, and their addresses as C takes them."""

    layers: Sequence[EncoderStackLayer]
    num_heads: int
    eps: float
    _records: ctypes.Array[_Layer] = field(init=False, repr=False)
    _sizes: _Sizes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        first = self.layers[0]
        self._records = (_Layer * len(self.layers))(*map(_layer_record, self.layers))
        self._sizes = _Sizes(first.out.out_size, self.num_heads, first.up.out_size, self.eps)

    def addresses(self) -> tuple[int, int, int]:
        return ctypes.addressof(self._records), len(self.layers), ctypes.addressof(self._sizes)


@operation(like="x")
def encoder_stack(
    x: Tensor,  # [num_tokens, hidden] float32: those of one text, which attend to each other
    stack: EncoderStack,
) -> Tensor:  # the same, before the norm after the last layer
    lib = native.library()
    assert lib is not None
    x = x.clone(memory_format=torch.contiguous_format)
    memory = torch.empty(4, *x.shape)
    if lib.slip_encoder_stack(*stack.addresses(), x.data_ptr(), memory.data_ptr(), x.shape[0], torch.get_num_threads()):
        raise MemoryError("no memory for the activations of an encoder")
    return x
