"""The name, shape and type of a tensor, known before it is read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TensorHeader(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # the type of the tensor once it is read

    def make_meta_tensor(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")
