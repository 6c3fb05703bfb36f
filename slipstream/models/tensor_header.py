"""What a file says of a tensor before any of it is read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TensorHeader(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # as the tensor will have it once it is read

    def make_meta_tensor(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")
