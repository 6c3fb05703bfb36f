"""The structures in which C takes matrices; see ``kernels.h``."""

from __future__ import annotations

import ctypes

import torch

# How a cache keeps its numbers; see ``cached.h``.
CACHED_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class SegmentRecord(ctypes.Structure):
    """Neighbouring rows of a matrix that are quantised alike."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kind", "rows", "group")),
    )


class MatrixRecord(ctypes.Structure):
    """A matrix in float32 panels, or of quantised segments. Whoever holds it keeps their tensors alive, too."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("segments", ctypes.POINTER(SegmentRecord)),
        *((name, ctypes.c_int64) for name in ("num_segments", "in_size", "out_size", "gated")),
    )
