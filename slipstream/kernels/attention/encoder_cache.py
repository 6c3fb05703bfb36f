"""Pages of an encoder's output: the page table of a batch, and the write of one request's keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.kernels.request_rows import EncoderPages
from slipstream.kernels.triton_jit import jit, next_power_of_2, runs_triton, tl

_ENTRIES_AT_ONCE = 16


def _batch_shape(encoder: EncoderPages, batch_rows: Tensor) -> tuple[TensorSpec, TensorSpec]:
    num_reqs = batch_rows.shape[0]
    table = TensorSpec((num_reqs, encoder.page_table.shape[1]), torch.int32)
    return table, TensorSpec((num_reqs,), torch.int32)


@operation(_batch_shape)
def gather_encoder_pages(
    encoder: EncoderPages,
    batch_rows: Tensor,  # [padded_reqs] int32; padding names the scratch row, which has no entries
) -> tuple[Tensor, Tensor]:  # [padded_reqs, max_encoder_pages], [padded_reqs] int32
    return encoder.page_table.index_select(0, batch_rows), encoder.lens.index_select(0, batch_rows)


@operation(writes=("kv_cache",))
def store_encoded(
    keys: Tensor,  # [num_entries, num_kv_heads, head_dim]
    values: Tensor,  # the same
    page_ids: Tensor,  # [max_encoder_pages] int32
    kv_cache: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim]
) -> None:
    if runs_triton(kv_cache):
        _launch_store(keys, values, page_ids, kv_cache)
        return
    page_size = kv_cache.shape[3]
    entry = torch.arange(keys.shape[0])
    pages, offsets = page_ids.long()[entry // page_size], entry % page_size
    for side, new in enumerate((keys, values)):
        kv_cache[pages, side, :, offsets] = new.to(kv_cache.dtype)


def _launch_store(keys: Tensor, values: Tensor, page_ids: Tensor, kv_cache: Tensor) -> None:
    num_entries, num_heads, head_dim = keys.shape
    _store_encoded_kernel[(-(-num_entries // _ENTRIES_AT_ONCE), num_heads)](
        keys,
        values,
        page_ids,
        kv_cache,
        num_entries,
        keys.stride(0),
        values.stride(0),
        kv_cache.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=kv_cache.shape[3],
        BLOCK_N=_ENTRIES_AT_ONCE,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=4,
    )


@jit
def _store_encoded_kernel(
    keys,
    values,
    page_ids,
    kv_cache,
    num_entries,
    key_stride,
    value_stride,
    page_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n, head = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    is_entry = n < num_entries
    kept = is_entry[:, None] & (d < HEAD_DIM)[None, :]
    page = tl.load(page_ids + n // PAGE_SIZE, mask=is_entry, other=0).to(tl.int64)
    to = page * page_stride + (head * PAGE_SIZE + n % PAGE_SIZE) * HEAD_DIM
    own = n.to(tl.int64)
    from_keys = (own * key_stride + head * HEAD_DIM)[:, None] + d[None, :]
    from_values = (own * value_stride + head * HEAD_DIM)[:, None] + d[None, :]
    side = NUM_HEADS * PAGE_SIZE * HEAD_DIM
    key = tl.load(keys + from_keys, mask=kept, other=0.0)
    value = tl.load(values + from_values, mask=kept, other=0.0)
    tl.store(kv_cache + to[:, None] + d[None, :], key.to(kv_cache.dtype.element_ty), mask=kept)
    tl.store(kv_cache + side + to[:, None] + d[None, :], value.to(kv_cache.dtype.element_ty), mask=kept)
