"""All layers of a dense decoder in one operation, for CPUs.

At a few tokens the work between two products is microseconds, less than what a call from Python costs once the weights
have washed the interpreter out of the caches. The same C kernels as layer by layer, in the same order: equal to the
bit.
"""

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
from slipstream.kernels.linear.dense_linear import PackedWeight
from slipstream.kernels.linear.quant_weights import QuantMatrix
from slipstream.kernels.native.records import CACHED_KINDS, MatrixRecord, fields

StackMatrix = PackedWeight | QuantMatrix


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer's weights."""

    input_norm: Tensor
    qkv: StackMatrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: StackMatrix
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: StackMatrix  # gated
    down: StackMatrix
    window: int


_VECTORS = "input_norm qkv_bias q_norm k_norm o_bias post_norm"
_MATRICES = "qkv o gate_up down"


class _Layer(ctypes.Structure):
    _fields_ = (
        fields(ctypes.c_void_p, _VECTORS)
        + fields(ctypes.POINTER(MatrixRecord), _MATRICES)
        + fields(ctypes.c_void_p, "cache")
        + fields(ctypes.c_int64, "window")
    )


class _Sizes(ctypes.Structure):
    _fields_ = fields(
        ctypes.c_int64, "hidden heads kv_heads dim intermediate page_size rotary_dim cache_kind"
    ) + fields(ctypes.c_float, "eps scale")


class _Step(ctypes.Structure):
    _fields_ = (
        fields(ctypes.c_int64, "tokens requests table_stride")
        + fields(ctypes.c_void_p, "hidden residual")
        + fields(ctypes.c_int64, "hidden_stride residual_stride")
        + fields(ctypes.c_void_p, "cosine sine page_ids offsets")
        + fields(ctypes.c_void_p, "starts query_lens seq_lens block_table seq_starts joined taps")
        + fields(ctypes.c_int64, "num_taps")
        + fields(ctypes.c_int, "planes num_threads alone")
    )


class Tap(ctypes.Structure):
    _fields_ = fields(ctypes.c_void_p, "out") + fields(ctypes.c_int64, "stride layer")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def matrix_record(matrix: StackMatrix) -> MatrixRecord:
    if isinstance(matrix, QuantMatrix):
        return matrix.record
    panels = matrix.panels
    return MatrixRecord(
        panels.data_ptr(), None, 0, panels.shape[1], matrix.out_size, matrix.gated, CACHED_KINDS[panels.dtype]
    )


def _layer_record(layer: StackLayer, cache: Tensor) -> _Layer:
    vectors = (_address(getattr(layer, name)) for name in _VECTORS.split())
    # ctypes keeps what a pointer was made of.
    matrices = (ctypes.pointer(matrix_record(getattr(layer, name))) for name in _MATRICES.split())
    return _Layer(*vectors, *matrices, cache.data_ptr(), layer.window)


@dataclass(slots=True)
class DecoderStack:
    """What is fixed about all layers together, and their addresses as C wants them."""

    layers: Sequence[StackLayer]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    planes: int = 0  # of activations before quantised matrices, see quant_linear
    alone: bool = False  # attention of a token is the same however many of its request are computed with it
    _records: ctypes.Array[_Layer] | None = field(default=None, repr=False)
    _sizes: _Sizes | None = field(default=None, repr=False)
    _caches: Sequence[Tensor] | None = field(default=None, repr=False)

    def records(self, kv_caches: Sequence[Tensor], rotary_dim: int) -> tuple[ctypes.Array[_Layer], _Sizes]:
        """One structure a layer, and sizes; made once, for an engine's caches stay where they are."""
        if self._records is None or self._sizes is None or self._caches is not kv_caches:
            pairs = zip(self.layers, kv_caches, strict=True)
            self._caches = kv_caches
            self._records = (_Layer * len(self.layers))(*(_layer_record(layer, cache) for layer, cache in pairs))
            self._sizes = _Sizes(
                hidden=self.hidden_size,
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                dim=self.head_dim,
                intermediate=self.layers[0].gate_up.out_size,
                page_size=kv_caches[0].shape[3],
                rotary_dim=rotary_dim,
                cache_kind=CACHED_KINDS[kv_caches[0].dtype],
                eps=self.eps,
                scale=self.scale,
            )
        return self._records, self._sizes


class StackInput(NamedTuple):
    """The states that the first of the layers begins with, all float32."""

    hidden: Tensor  # [num_tokens, hidden]: the embeddings, or what a layer has left
    residual: Tensor | None  # [num_tokens, hidden]: the stream it is still to be added to
    # [num_tokens, in]: the first projection's input, of a layer that makes it from more than the states. ``hidden`` is
    # not read then.
    joined: Tensor | None = None


class LayerTap(NamedTuple):
    """Receives the stream before a layer."""

    layer: int
    out: Tensor  # [num_tokens, hidden], rows may be strided


def tap_records(taps: Sequence[LayerTap]) -> ctypes.Array[Tap]:
    return (Tap * len(taps))(*(Tap(out.data_ptr(), out.stride(0), layer) for layer, out in taps))


@operation(like=("inputs.hidden", "inputs.hidden"), writes=("kv_caches", "taps"))
def decoder_stack(
    inputs: StackInput,
    stack: DecoderStack,
    kv_caches: Sequence[Tensor],  # one a layer: [num_pages, 2, num_kv_heads, page_size, head_dim]
    tokens: TokenPlaces,
    requests: PagedRequests,
    taps: Sequence[LayerTap] = (),  # written
    num_layers: int | None = None,  # of the stack, from the first on; None: all
) -> tuple[Tensor, Tensor]:  # the last layer's contribution, and the residual it is still to be added to
    lib = native.library()
    assert lib is not None
    layers, sizes = stack.records(kv_caches, tokens.cos.shape[-1])
    hidden, residual, joined = inputs
    tapped = tap_records(taps)
    step = _Step(
        tokens=hidden.shape[0],
        requests=requests.seq_lens.shape[0],
        table_stride=requests.block_table.stride(0),
        hidden=hidden.data_ptr(),
        residual=_address(residual),
        hidden_stride=hidden.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        cosine=tokens.cos.data_ptr(),
        sine=tokens.sin.data_ptr(),
        page_ids=tokens.page_ids.data_ptr(),
        offsets=tokens.offsets.data_ptr(),
        starts=requests.query_start_loc.data_ptr(),
        query_lens=requests.query_lens.data_ptr(),
        seq_lens=requests.seq_lens.data_ptr(),
        block_table=requests.block_table.data_ptr(),
        seq_starts=_address(requests.seq_starts),
        joined=_address(joined),
        taps=ctypes.addressof(tapped),
        num_taps=len(taps),
        planes=stack.planes,
        num_threads=torch.get_num_threads(),
        alone=stack.alone,
    )
    step.kept = tapped  # as long as the call may be made again
    count = len(layers) if num_layers is None else num_layers
    assert hidden.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    out, left = torch.empty(hidden.shape), torch.empty(hidden.shape)
    records = (layers, count, ctypes.byref(sizes), ctypes.byref(step))
    if lib.slip_decoder_stack(*records, out.data_ptr(), left.data_ptr()):
        raise MemoryError("no memory for the activations of a step")
    return out, left
