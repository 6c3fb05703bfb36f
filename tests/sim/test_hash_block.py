"""The block head of the simulated worlds notices whatever is wrong with its context, its block or its positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.attention.metadata import CommonAttentionMetadata
from tests.contexts import context_of
from tests.sim.hash_block import MASK, HashBlockHead
from tests.sim.hash_model import NUM_LAYERS, VOCAB_SIZE, HashBackend, HashModel
from tests.sim.oracle import HashSequence

PAGE, BLOCK = 4, 4
TEXT = [(7 * i + 3 * i * i) % VOCAB_SIZE for i in range(18)]
TABLE = torch.tensor([[3, 9, 5, 1, 12, 7, 2]], dtype=torch.int32)


def caches() -> list[Tensor]:
    """What no token has written is no number."""
    made = [torch.full((14, 2, 1, PAGE, 4), torch.nan, dtype=torch.float64) for _ in range(NUM_LAYERS)]
    for cache in made:
        cache[0] = 0.0
    return made


def context(kv_caches: list[Tensor], slots: range, start: int = 0, is_causal: bool = True) -> AttentionContext:
    positions = torch.tensor(list(slots))
    slot_mapping = TABLE[0, positions // PAGE].long() * PAGE + positions % PAGE
    count, ends = torch.tensor([len(slots)], dtype=torch.int32), np.array([slots.stop], dtype=np.int32)
    starts = np.array([0, len(slots)], dtype=np.int32)
    common = CommonAttentionMetadata(
        num_reqs=1,
        num_actual_tokens=len(slots),
        max_query_len=len(slots),
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_cpu=starts,
        query_lens=count,
        seq_lens=torch.from_numpy(ends),
        seq_lens_cpu_upper_bound=ends,
        block_table=TABLE,
        slot_mapping=slot_mapping,
        seq_starts=torch.tensor([start], dtype=torch.int32),
        is_causal=is_causal,
    )
    return context_of(HashBackend(), common, kv_caches, positions, slot_mapping)


def states(
    start: int = 0,
    spoil: Callable[[list[Tensor]], None] = lambda _: None,
    spoil_features: Callable[[Tensor], None] = lambda _: None,
    ids: tuple[int, ...] = (TEXT[-1], MASK, MASK, MASK),
    moved: int = 0,
) -> list[float]:
    """The state at each place of a block after the text, whose context begins at a slot."""
    n = len(TEXT) - 1
    features = torch.zeros(n, (NUM_LAYERS + 1) * 6, dtype=torch.float64)
    everything = context(caches(), range(n))
    everything.taps = dict(enumerate(torch.split(features, 6, dim=1)))
    HashModel(64, torch.device("cpu")).forward(torch.tensor(TEXT[:-1], dtype=torch.int32), everything)
    head, own = HashBlockHead(64, torch.device("cpu"), VOCAB_SIZE, None, BLOCK), caches()
    spoil_features(features)
    head.write_context(features[start:], context(own, range(start, n)))
    spoil(own)
    block = context(own, range(n + moved, n + moved + BLOCK), start, is_causal=False)
    return head.forward(torch.tensor(ids, dtype=torch.int32), {False: block})[1:, 0].tolist()


def right_states() -> list[float]:
    """The text goes on with what the states say, wrong guesses included: see ``hash_model.guess``."""
    sequence, found = HashSequence(), []
    for token_id in TEXT:
        sequence.append(token_id)
    for _ in range(BLOCK - 1):
        found.append(float(sequence.state))
        state = sequence.state
        sequence.append((state + (state // VOCAB_SIZE**3 % 4 == 0)) % VOCAB_SIZE)
    return found


@pytest.mark.parametrize("start", [0, 5, 16])
def test_a_head_that_keeps_everything_is_right(start: int) -> None:
    assert states(start) == right_states()


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("slot", [0, 7, 16])
@pytest.mark.parametrize("column", [0, 1])
def test_a_key_of_another_token_or_position_shows(layer: int, slot: int, column: int) -> None:
    def spoil(own: list[Tensor]) -> None:
        page, offset = int(TABLE[0, slot // PAGE]), slot % PAGE
        own[layer][page, 0, 0, offset, column] += 1
        own[layer][page, 1, 0, offset, 3 - column] += 1

    assert states(spoil=spoil)[0] != right_states()[0]


@pytest.mark.parametrize("tap", range(NUM_LAYERS))
def test_a_state_of_another_token_shows(tap: int) -> None:
    def spoil(features: Tensor) -> None:
        features[9, 6 * tap : 6 * tap + 6] = features[8, 6 * tap : 6 * tap + 6].clone()

    assert states(spoil_features=spoil)[0] != right_states()[0]


def test_another_block_shows() -> None:
    assert states(ids=(TEXT[-1], MASK, MASK + 1, MASK))[1] != right_states()[1]
    assert states(ids=(TEXT[-2], MASK, MASK, MASK))[0] != right_states()[0]
    with pytest.raises(ValueError, match="no token left here"):
        states(moved=1)
