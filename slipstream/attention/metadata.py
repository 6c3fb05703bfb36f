"""The metadata of a step for every attention backend. Plain data; reading a field never touches the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.request_rows import EncoderPages


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """One step's batch. Device tensors are exact and padded; host numbers size grids, workspaces and graphs."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # [padded_reqs + 1] int32, device
    query_start_loc_cpu: npt.NDArray[np.int32]  # [num_reqs + 1], the same numbers on the host, from the plan
    # Query tokens in use of each request; the draft slots after them are unused.
    query_lens: Tensor  # [padded_reqs] int32, device
    seq_lens: Tensor  # [padded_reqs] int32, device: exact, 0 for rows that do not run
    # Host arithmetic on the optimistic mirror: exact for prefill, never below the device's value.
    seq_lens_cpu_upper_bound: npt.NDArray[np.int32]  # [num_reqs]
    block_table: Tensor  # [padded_reqs, max_pages] int32, device
    slot_mapping: Tensor  # [padded_tokens] int64, device; -1 writes nothing
    # [padded_reqs] int32, device: the first slot of each with valid keys; None: 0 for all. Slots before it may hold
    # anything and are never attended to; a token before the first slot attends to nothing.
    seq_starts: Tensor | None = None
    # [num_reqs]: exact computed tokens of each before the step, where the host knows them because no other step is in
    # flight. Not limited to the context length.
    num_computed_cpu: npt.NDArray[np.int32] | None = None
    # [padded_reqs] int32, device: the requests' rows, for layers with states by row; the scratch row for padding.
    batch_rows: Tensor | None = None
    # [num_reqs]: draft slots among each one's query tokens. None: there are none.
    num_drafts_cpu: npt.NDArray[np.int32] | None = None
    # Whether attention is causal. Otherwise the query tokens of a request attend to each other and to all before: a
    # drafter's pass over a block.
    is_causal: bool = True
    encoder: EncoderPages | None = None  # of every row, for layers over the output of an encoder
    # Leading requests that decode, with equally many query tokens each; 0 where the host does not know, as in a
    # recording, which serves batches of any kinds.
    num_decodes: int = 0
    num_common_pages: int = 0  # pages of a prefix common to all requests of the batch, without its query tokens

    @property
    def requests(self) -> PagedRequests:
        return PagedRequests(self.query_start_loc, self.query_lens, self.seq_lens, self.block_table, self.seq_starts)

    @property
    def max_seq_len(self) -> int:
        """An upper bound of every sequence length in the batch."""
        return int(self.seq_lens_cpu_upper_bound.max(initial=0))
