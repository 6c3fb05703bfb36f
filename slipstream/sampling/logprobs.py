"""Log probabilities of the model itself, before any sampling parameter: of a given token, and of the most likely ones.

Packed into a fixed number of int32, so that they fit a preallocated buffer: rank, then 1 + 20 token ids, then the bits
of their 1 + 20 values. The given token comes first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.device.operation import TensorSpec, operation
from slipstream.output import LogprobRow
from slipstream.sampling_params import MAX_LOGPROBS

LOGPROB_WIDTH = 1 + 2 * (1 + MAX_LOGPROBS)


@operation(lambda logits: TensorSpec((logits.shape[0], LOGPROB_WIDTH), torch.int32))
def pack_logprobs(
    logits: Tensor,  # [n, vocab]
    token_ids: Tensor,  # [n] int64
) -> Tensor:  # [n, LOGPROB_WIDTH] int32
    logprobs = logits.log_softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32)).float()
    top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=1)
    return pack(logprobs, token_ids, top.values, top.indices)


def pack(
    logprobs: Tensor,  # [n, vocab] float32
    token_ids: Tensor,  # [n] int64
    top_values: Tensor,  # [n, at most 20] float32, descending
    top_ids: Tensor,  # [n, at most 20]
) -> Tensor:  # [n, LOGPROB_WIDTH] int32
    given = token_ids.long().unsqueeze(1)
    given_value = logprobs.gather(1, given)
    rank = (logprobs > given_value).sum(1, keepdim=True) + 1
    missing = MAX_LOGPROBS - top_ids.shape[1]
    ids = torch.nn.functional.pad(torch.cat([given, top_ids], 1), (0, missing), value=-1)
    values = torch.nn.functional.pad(torch.cat([given_value, top_values], 1), (0, missing), value=-torch.inf)
    return torch.cat([rank.int(), ids.int(), values.view(torch.int32)], 1)


def unpack_logprobs(packed: npt.NDArray[np.int32]) -> list[LogprobRow]:
    """Host side: rows as read from the output ring."""
    middle = 2 + MAX_LOGPROBS
    values = np.ascontiguousarray(packed[:, middle:]).view(np.float32)
    return [
        LogprobRow(rank, ids, own)
        for rank, ids, own in zip(packed[:, 0].tolist(), packed[:, 1:middle].tolist(), values.tolist(), strict=True)
    ]
