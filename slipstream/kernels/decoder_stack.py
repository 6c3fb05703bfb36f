"""All layers of a dense decoder in one operation, for CPUs.

At a few tokens the work between two products is microseconds, less than what a call from Python costs once the weights
have washed the interpreter out of the caches. The same C kernels as layer by layer, in the same order: equal to the
bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation, spec_of
from slipstream.kernels import native
from slipstream.kernels.linear import PackedWeight
from slipstream.kernels.native.records import CACHED_KINDS, MatrixRecord
from slipstream.kernels.quant_weights import QuantMatrix

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


_VECTORS = ("input_norm", "qkv_bias", "q_norm", "k_norm", "o_bias", "post_norm")
_MATRICES = ("qkv", "o", "gate_up", "down")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _VECTORS),
        *((name, ctypes.POINTER(MatrixRecord)) for name in _MATRICES),
        ("cache", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "intermediate", "page_size")),
        *((name, ctypes.c_int64) for name in ("rotary_dim", "cache_kind")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "requests", "table_stride")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "page_ids", "offsets")),
        *((name, ctypes.c_void_p) for name in ("starts", "query_lens", "seq_lens", "block_table", "seq_starts")),
        ("planes", ctypes.c_int),
        ("num_threads", ctypes.c_int),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _matrix_record(matrix: StackMatrix) -> MatrixRecord:
    if isinstance(matrix, QuantMatrix):
        return matrix.record
    panels = matrix.panels
    return MatrixRecord(panels.data_ptr(), None, 0, panels.shape[1], matrix.out_size, matrix.gated)


def _layer_record(layer: StackLayer, cache: Tensor) -> _Layer:
    vectors = (_address(getattr(layer, name)) for name in _VECTORS)
    # ctypes keeps what a pointer was made of.
    matrices = (ctypes.pointer(_matrix_record(getattr(layer, name))) for name in _MATRICES)
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
    _records: ctypes.Array[_Layer] | None = field(default=None, repr=False)
    _caches: Sequence[Tensor] | None = field(default=None, repr=False)

    def records(self, kv_caches: Sequence[Tensor]) -> ctypes.Array[_Layer]:
        """One structure a layer; made once, for an engine's caches stay where they are."""
        if self._records is None or self._caches is not kv_caches:
            pairs = zip(self.layers, kv_caches, strict=True)
            self._caches = kv_caches
            self._records = (_Layer * len(self.layers))(*(_layer_record(layer, cache) for layer, cache in pairs))
        return self._records


def _shape(
    hidden: Tensor,
    residual: Tensor | None,
    stack: DecoderStack,
    kv_caches: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    page_ids: Tensor,
    offsets: Tensor,
    query_start_loc: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    begin: int,
    end: int,
    seq_starts: Tensor | None = None,
) -> tuple[TensorSpec, TensorSpec]:
    return spec_of(hidden), spec_of(hidden)


@operation(_shape, writes=("kv_caches",))
def decoder_stack(
    hidden: Tensor,  # [num_tokens, hidden] float32: the embeddings, or what a layer has left
    residual: Tensor | None,  # [num_tokens, hidden] float32: the stream it is still to be added to
    stack: DecoderStack,
    kv_caches: Sequence[Tensor],  # one a layer: [num_pages, 2, num_kv_heads, page_size, head_dim]
    cos: Tensor,  # [num_tokens, 1, rotary_dim], from rotation
    sin: Tensor,  # [num_tokens, 1, rotary_dim], from rotation
    page_ids: Tensor,  # [num_tokens] int64, from rotation_and_slots
    offsets: Tensor,  # [num_tokens] int64, from rotation_and_slots
    query_start_loc: Tensor,  # [num_reqs + 1] int32
    query_lens: Tensor,  # [num_reqs] int32
    seq_lens: Tensor,  # [num_reqs] int32
    block_table: Tensor,  # [num_reqs, max_pages] int32
    begin: int,  # the first layer
    end: int,  # the one behind the last
    seq_starts: Tensor | None = None,  # [num_reqs] int32: the first slot whose keys are there; None: 0 for all
) -> tuple[Tensor, Tensor]:  # the last layer's contribution, and the residual it is still to be added to
    lib = native.library()
    assert lib is not None
    layers = stack.records(kv_caches)
    sizes = _Sizes(
        stack.hidden_size,
        stack.num_heads,
        stack.num_kv_heads,
        stack.head_dim,
        stack.layers[0].gate_up.out_size,
        kv_caches[0].shape[3],
        cos.shape[-1],
        CACHED_KINDS[kv_caches[0].dtype],
        stack.eps,
        stack.scale,
    )
    tables = (query_start_loc, query_lens, seq_lens, block_table, seq_starts)
    arrays = [_address(x) for x in (cos, sin, page_ids, offsets, *tables)]
    sizes_of_step = (hidden.shape[0], seq_lens.shape[0], block_table.stride(0))
    step = _Step(*sizes_of_step, *arrays, stack.planes, torch.get_num_threads())
    out, residual = hidden.clone(), torch.zeros_like(hidden) if residual is None else residual.clone()
    first = ctypes.addressof(layers) + begin * ctypes.sizeof(_Layer)
    pointers = (first, end - begin, ctypes.addressof(sizes), ctypes.addressof(step))
    if lib.slip_decoder_stack(*pointers, out.data_ptr(), residual.data_ptr()):
        raise MemoryError("no memory for the activations of a step")
    return out, residual
