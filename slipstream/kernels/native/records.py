"""The structures in which C takes matrices; see ``kernels.h``."""

from __future__ import annotations

import ctypes

import torch

# How caches and panels keep their numbers; see ``cached.h``.
CACHED_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Of a structure: these names, one after the other, all of one kind."""
    return [(name, kind) for name in names.split()]


class SegmentRecord(ctypes.Structure):
    """Neighbouring rows of a matrix that are quantised alike."""

    _fields_ = fields(ctypes.c_void_p, "panels") + fields(ctypes.c_int64, "kind rows group")


class MatrixRecord(ctypes.Structure):
    """A matrix in panels, or of quantised segments. Its owner keeps their tensors alive, too."""

    _fields_ = (
        fields(ctypes.c_void_p, "panels")
        + fields(ctypes.POINTER(SegmentRecord), "segments")
        + fields(ctypes.c_int64, "num_segments in_size out_size gated panel_kind")
    )
