"""A look at the residual stream between two layers: the sum that the next norm would make, put where it is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.device.operation import operation, writes_only


@operation(writes_only, writes=("out",))
def tap(
    hidden: Tensor,  # [num_tokens, hidden]: the last layer's contribution, or the stream itself
    residual: Tensor | None,  # [num_tokens, hidden]: the stream it is still to be added to
    out: Tensor,  # [num_tokens, hidden], rows may be far apart: several taps lie beside each other
) -> None:
    if residual is None:
        out.copy_(hidden)
    else:
        torch.add(hidden, residual, out=out)
