"""All layers of a decoder with cross attention in one operation, for CPUs; see ``decoder_stack``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.operation import operation
from slipstream.kernels import native
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.attention.rope_cache import TokenPlaces
from slipstream.kernels.native.decoder_stack import LayerTap, StackMatrix, matrix_record, tap_records
from slipstream.kernels.native.records import CACHED_KINDS, MatrixRecord, fields

_VECTORS = "self_norm self_shift qkv_bias out_bias cross_norm cross_shift query_bias cross_out_bias"
_MORE_VECTORS = "norm shift up_bias down_bias"
_MATRICES = "qkv out query cross_out up down"


@dataclass(frozen=True, slots=True)
class CrossStackLayer:
    """One layer's weights. ``shift`` is what a norm adds."""

    self_norm: Tensor
    self_shift: Tensor
    qkv: StackMatrix
    qkv_bias: Tensor
    out: StackMatrix
    out_bias: Tensor
    cross_norm: Tensor
    cross_shift: Tensor
    query: StackMatrix
    query_bias: Tensor
    cross_out: StackMatrix
    cross_out_bias: Tensor
    norm: Tensor
    shift: Tensor
    up: StackMatrix  # gelu follows
    up_bias: Tensor
    down: StackMatrix
    down_bias: Tensor


class _Layer(ctypes.Structure):
    _fields_ = (
        fields(ctypes.c_void_p, f"{_VECTORS} {_MORE_VECTORS}")
        + fields(ctypes.POINTER(MatrixRecord), _MATRICES)
        + fields(ctypes.c_void_p, "cache encoded")
    )


class _Sizes(ctypes.Structure):
    _fields_ = fields(ctypes.c_int64, "hidden heads dim intermediate page_size rotary_dim cache_kind") + fields(
        ctypes.c_float, "eps scale"
    )


class _Step(ctypes.Structure):
    _fields_ = (
        fields(ctypes.c_int64, "tokens requests table_stride encoded_stride")
        + fields(ctypes.c_void_p, "cosine sine page_ids offsets starts query_lens seq_lens block_table seq_starts")
        + fields(ctypes.c_void_p, "encoded_lens encoded_table taps")
        + fields(ctypes.c_int64, "num_taps")
        + fields(ctypes.c_int, "planes num_threads")
    )


class CrossCaches(NamedTuple):
    """One tensor a layer each: [num_pages, 2, num_heads, page_size, head_dim]."""

    text: Sequence[Tensor]
    encoded: Sequence[Tensor]


class CrossRequests(NamedTuple):
    text: PagedRequests
    encoded: PagedRequests  # the same tokens, and the pages of their encoder's output


def _layer_record(layer: CrossStackLayer, cache: Tensor, encoded: Tensor) -> _Layer:
    vectors = (getattr(layer, name).data_ptr() for name in [*_VECTORS.split(), *_MORE_VECTORS.split()])
    # ctypes keeps what a pointer was made of.
    matrices = (ctypes.pointer(matrix_record(getattr(layer, name))) for name in _MATRICES.split())
    return _Layer(*vectors, *matrices, cache.data_ptr(), encoded.data_ptr())


@dataclass(slots=True)
class CrossStack:
    """What is fixed about all layers together, and their addresses as C takes them."""

    layers: Sequence[CrossStackLayer]
    num_heads: int
    head_dim: int
    eps: float
    scale: float
    planes: int = 0  # of activations before quantised matrices, see quant_linear
    _records: ctypes.Array[_Layer] | None = field(default=None, repr=False)
    _sizes: _Sizes | None = field(default=None, repr=False)
    _caches: tuple[Sequence[Tensor], Sequence[Tensor]] | None = field(default=None, repr=False)

    def records(self, caches: CrossCaches, rotary_dim: int) -> tuple[ctypes.Array[_Layer], _Sizes]:
        """One structure a layer, and sizes; made once, for an engine's caches stay where they are."""
        known = self._caches
        if known is None or known[0] is not caches.text or known[1] is not caches.encoded:
            triples = zip(self.layers, caches.text, caches.encoded, strict=True)
            self._caches = (caches.text, caches.encoded)
            self._records = (_Layer * len(self.layers))(*(_layer_record(*each) for each in triples))
            self._sizes = _Sizes(
                hidden=self.num_heads * self.head_dim,
                heads=self.num_heads,
                dim=self.head_dim,
                intermediate=self.layers[0].up.out_size,
                page_size=caches.text[0].shape[3],
                rotary_dim=rotary_dim,
                cache_kind=CACHED_KINDS[caches.text[0].dtype],
                eps=self.eps,
                scale=self.scale,
            )
        assert self._records is not None
        assert self._sizes is not None
        return self._records, self._sizes


@operation(like="hidden", writes=("caches", "taps"))
def cross_stack(
    hidden: Tensor,  # [num_tokens, hidden] float32: the input of the first layer
    stack: CrossStack,
    caches: CrossCaches,
    tokens: TokenPlaces,
    requests: CrossRequests,
    taps: Sequence[LayerTap] = (),  # written
    num_layers: int | None = None,  # of the stack, from the first on; None: all
) -> Tensor:  # the stream after the last layer
    lib = native.library()
    assert lib is not None
    layers, sizes = stack.records(caches, tokens.cos.shape[-1])
    records, text, encoded = tap_records(taps), requests.text, requests.encoded
    step = _Step(
        tokens=hidden.shape[0],
        requests=text.seq_lens.shape[0],
        table_stride=text.block_table.stride(0),
        encoded_stride=encoded.block_table.stride(0),
        cosine=tokens.cos.data_ptr(),
        sine=tokens.sin.data_ptr(),
        page_ids=tokens.page_ids.data_ptr(),
        offsets=tokens.offsets.data_ptr(),
        starts=text.query_start_loc.data_ptr(),
        query_lens=text.query_lens.data_ptr(),
        seq_lens=text.seq_lens.data_ptr(),
        block_table=text.block_table.data_ptr(),
        seq_starts=None if text.seq_starts is None else text.seq_starts.data_ptr(),
        encoded_lens=encoded.seq_lens.data_ptr(),
        encoded_table=encoded.block_table.data_ptr(),
        taps=ctypes.addressof(records),
        num_taps=len(taps),
        planes=stack.planes,
        num_threads=torch.get_num_threads(),
    )
    out, count = hidden.clone(), len(layers) if num_layers is None else num_layers
    step.kept = records  # as long as the call may be made again
    addresses = (layers, count, ctypes.byref(sizes), ctypes.byref(step))
    if lib.slip_cross_stack(*addresses, out.data_ptr()):
        raise MemoryError("no memory for the activations of a step")
    return out
