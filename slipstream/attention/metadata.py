"""What every attention backend is told about a step. Plain data; reading a field never touches the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slipstream.kernels.paged_attention import PagedRequests


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """One step's batch. Device tensors are exact and padded; host numbers size grids, workspaces and graphs."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # [padded_reqs + 1] int32, device
    query_start_loc_cpu: npt.NDArray[np.int32]  # [num_reqs + 1], the same numbers, from the plan
    # How many of a request's query tokens are alive, from the first on; behind them stand drafts that were not made.
    query_lens: Tensor  # [padded_reqs] int32, device
    seq_lens: Tensor  # [padded_reqs] int32, device: exact, 0 for rows that do not run
    # Host arithmetic on the optimistic mirror: exact for prefill, never below the device's value.
    seq_lens_cpu_upper_bound: npt.NDArray[np.int32]  # [num_reqs]
    block_table: Tensor  # [padded_reqs, max_pages] int32, device
    slot_mapping: Tensor  # [padded_tokens] int64, device; -1 writes nothing
    # [padded_reqs] int32, device: the first slot of each whose keys are there; None: 0 for all. What lies before may be
    # anything and is seen by nobody; a token before the first slot sees nothing.
    seq_starts: Tensor | None = None
    # [num_reqs]: computed tokens of each before the step, where the host knows them for certain, for no other step is
    # under way. Not cut to the context limit.
    num_computed_cpu: npt.NDArray[np.int32] | None = None
    # [padded_reqs] int32, device: the requests' rows, where layers keep states by them; padding names the scratch row.
    batch_rows: Tensor | None = None
    # [num_reqs]: of each one's query tokens, how many are places for drafts. None: nobody has any.
    num_drafts_cpu: npt.NDArray[np.int32] | None = None
    # Whether a token sees none after it. Otherwise all living query tokens of a request see each other, and all before:
    # a drafter's pass over a block.
    is_causal: bool = True
    num_common_pages: int = 0  # all requests of the batch begin with these pages, and none of its tokens stands there

    @property
    def requests(self) -> PagedRequests:
        return PagedRequests(self.query_start_loc, self.query_lens, self.seq_lens, self.block_table, self.seq_starts)

    @property
    def max_seq_len(self) -> int:
        """An upper bound of every sequence length in the batch."""
        return int(self.seq_lens_cpu_upper_bound.max(initial=0))
