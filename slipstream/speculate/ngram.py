"""N-gram drafts: what followed the last tokens when they stood in the request before.

Nothing is taken from the target and nothing is kept: the row's own tokens are searched anew after every step, on the
device.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.speculate.ngram_search import find_continuation
from slipstream.speculate.speculator import DraftBatch, DraftRows, NoSpeculator
from slipstream.speculative_config import SpeculativeConfig


class NgramSpeculator(NoSpeculator):
    def __init__(self, config: SpeculativeConfig, rows: DraftRows) -> None:
        self._config = config
        self._rows = rows

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        rows, config = self._rows, self._config
        searched = (batch.rows, rows.token_ids, rows.num_tokens, rows.max_drafts)
        return find_continuation(*searched, config.min_match, config.max_match, batch.num_drafts)

    run = propose
