"""Memory of the paged key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.config import CacheConfig, ModelConfig


def allocate_kv_caches(
    model: ModelConfig, cache: CacheConfig, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One tensor a layer: [num_pages, 2, num_kv_heads, page_size, head_dim].

    A page of one head is contiguous, which is what decode kernels read, and a page is addressed by bytes that only the
    element size changes, so that a cache of lower precision keeps page ids, tables and kernels' index arithmetic.
    Only the null page is cleared, for padding may read it; no token reads any other slot before it was written, and
    clearing gigabytes takes seconds.
    """
    shape = (cache.num_pages, 2, model.num_kv_heads, cache.page_size, model.head_dim)
    caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(model.num_layers)]
    for memory in caches:
        memory[0].zero_()
    return caches
