from __future__ import annotations

import numpy as np
import torch

from slipstream.kernels.step.row_writes import write_rows


def test_scatters_values_to_destinations() -> None:
    store = torch.arange(10, dtype=torch.int32)
    destinations, values = np.array([7, 0, 3], dtype=np.int64), np.array([70, -1, 30], dtype=np.int32)
    staged = torch.from_numpy(np.concatenate([destinations.view(np.int32), values]))
    write_rows(store, staged)
    assert store.tolist() == [-1, 1, 2, 30, 4, 5, 6, 70, 8, 9]
