"""Rows of quantised blocks with any codes, and their values by the ``gguf`` package."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.linear.quant_weights import KINDS, QuantSegment, pack_gguf

GGUF_KINDS = [name for name, kind in KINDS.items() if kind.file_block[0]]
# Where a block has its fp16 numbers.
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def in_sizes(kind: str) -> tuple[int, ...]:
    """Odd ones: an odd number of blocks, and those of real models."""
    return (512, 1536) if kind.endswith("K") else (96, 576, 896)


def random_rows(kind: str, num_rows: int, in_size: int, seed: int = 0) -> np.ndarray:
    """[num_rows, bytes of a row]: all codes and scales occur."""
    rng = np.random.default_rng(seed)
    weights, num_bytes = KINDS[kind].file_block
    blocks = rng.integers(0, 256, (num_rows * in_size // weights, num_bytes), dtype=np.uint8)
    for offset in _HALVES.get(kind, (0,)):
        halves = rng.normal(0, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def reference(kind: str, raw: np.ndarray) -> Tensor:
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def random_segment(kind: str, num_rows: int, in_size: int, seed: int = 0) -> tuple[QuantSegment, Tensor]:
    """Panels, and the weight they hold."""
    raw = random_rows(kind, num_rows, in_size, seed)
    segment = pack_gguf(torch.from_numpy(raw), kind)
    assert segment is not None
    return segment, reference(kind, raw)
