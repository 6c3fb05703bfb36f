"""Memory of the paged key-value cache."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from slipstream.config import CacheConfig, ModelConfig


def allocate_kv_caches(
    model: ModelConfig, cache: CacheConfig, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One tensor a layer that has attention: [num_pages + 1, 2, num_kv_heads, page_size, head_dim].

    A page of one head is contiguous, which is what decode kernels read, and a page is addressed by bytes that only the
    element size changes, so that a cache of lower precision keeps page ids, tables and kernels' index arithmetic. The
    page beyond the last takes the keys of tokens that are not to be stored. Page 0, the null page, stays zero: padding
    reads it. A CPU's memory comes from the system as zeros that cost nothing until they are touched.
    """
    shape = (cache.num_pages + 1, 2, model.num_kv_heads, cache.page_size, model.head_dim)
    if device.type == "cpu":
        num_bytes = math.prod(shape) * dtype.itemsize
        zeros = (np.zeros(num_bytes, np.uint8) for _ in range(model.num_attention_layers))
        return [torch.from_numpy(memory).view(dtype).view(shape) for memory in zeros]
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_attention_layers)]
