"""N-gram drafts: the tokens that followed the last tokens when these occurred earlier in the request.

Needs nothing from the target and keeps no state: the row's own tokens are searched after every step, on the
device.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.request_rows import RowState
from slipstream.speculate.methods.ngram import MAX_KEY, MIN_KEY
from slipstream.speculate.ngram_search import find_continuation
from slipstream.speculate.speculator import DraftBatch, NoSpeculator
from slipstream.speculative_config import SpeculativeConfig


class NgramSpeculator(NoSpeculator):
    def __init__(self, config: SpeculativeConfig, rows: RowState) -> None:
        self._min_match, self._max_match = config.settings[MIN_KEY], config.settings[MAX_KEY]
        self._rows = rows

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        rows = self._rows
        searched = (batch.rows, rows.token_ids, rows.num_tokens, rows.max_drafts)
        return find_continuation(*searched, self._min_match, self._max_match, batch.num_drafts)
