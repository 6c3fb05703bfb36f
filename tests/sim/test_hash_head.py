"""The head of the simulated worlds notices whatever is wrong with its cache, from any first slot on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.attention.metadata import CommonAttentionMetadata
from tests.contexts import context_of
from tests.sim.hash_head import HashHead, HeadShape
from tests.sim.hash_model import NUM_LAYERS, VOCAB_SIZE, HashBackend, HashModel
from tests.sim.oracle import HashSequence

CPU, PAGE, WIDTH = torch.device("cpu"), 4, 6
LENGTHS, STARTS, MIDDLE = (19, 14), (6, 0), 4  # of two requests; the first pass goes so far beyond each first slot
TABLE = torch.tensor([[3, 9, 5, 1, 12, 7], [2, 4, 8, 6, 10, 11], [0] * 6], dtype=torch.int32)
TOKENS = [[(7 * i + 3 * i * i + 11 * n) % VOCAB_SIZE for i in range(n)] for n in LENGTHS]


def caches(num: int) -> list[Tensor]:
    """What no token has written is no number."""
    made = [torch.full((14, 2, 1, PAGE, 4), torch.nan, dtype=torch.float64) for _ in range(num)]
    for cache in made:
        cache[0] = 0.0
    return made


def context(kv_caches: list[Tensor], slots: list[range], seq_starts: Tensor | None) -> AttentionContext:
    """A pass over some slots of each request, and a third request that is padding."""
    lens = [len(own) for own in slots] + [0]
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    positions = torch.tensor([p for own in slots for p in own])
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    slot_mapping = TABLE[owner, positions // PAGE].long() * PAGE + positions % PAGE
    seq_lens = np.array([own.stop for own in slots] + [0], dtype=np.int32)
    common = CommonAttentionMetadata(
        num_reqs=2,
        num_actual_tokens=len(positions),
        max_query_len=max(lens),
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_cpu=starts,
        query_lens=torch.tensor(lens, dtype=torch.int32),
        seq_lens=torch.from_numpy(seq_lens),
        seq_lens_cpu_upper_bound=seq_lens,
        block_table=TABLE,
        slot_mapping=slot_mapping,
        seq_starts=seq_starts,
    )
    return context_of(HashBackend(), common, kv_caches, positions, slot_mapping)


def flat(slots: list[range], tables: list[Tensor]) -> Tensor:
    return torch.cat([table[own.start : own.stop] for own, table in zip(slots, tables, strict=True)])


def final_states(
    num_modules: int, spoil: Callable[[list[Tensor]], None] = lambda _: None, moved: int = 0
) -> list[list[float]]:
    """What each module makes of each request's last token, after two passes, between which the cache may be spoilt."""
    target, features = caches(NUM_LAYERS), torch.zeros(sum(LENGTHS), 2 * WIDTH, dtype=torch.float64)
    everything = context(target, [range(n) for n in LENGTHS], None)
    everything.taps = {1: features[:, :WIDTH], 2: features[:, WIDTH:]}
    HashModel(64, CPU).forward(torch.tensor([*TOKENS[0], *TOKENS[1]], dtype=torch.int32), everything)
    head = HashHead(64, CPU, VOCAB_SIZE, HeadShape((1, 2), num_modules))
    own, of_request = caches(num_modules), list(features.split(LENGTHS))
    following = [torch.tensor([*tokens[1:], 0], dtype=torch.int32) for tokens in TOKENS]
    # A first slot has no state before it: what is read there is the null page.
    kept = [[torch.zeros(n + 1, head.config.hidden_size).double() for n in LENGTHS] for _ in range(num_modules)]
    first = [range(start, start + MIDDLE) for start in STARTS]
    last = [range(start + MIDDLE, n - 1) for start, n in zip(STARTS, LENGTHS, strict=True)]
    for slots in (first, last):
        starts = torch.tensor([*STARTS, 50], dtype=torch.int32)
        if slots is last:
            spoil(own)
            starts[0] += moved
        step = context(own, slots, starts)
        for m in range(num_modules):
            hidden = head.combine(flat(slots, of_request)) if m == 0 else flat(slots, kept[m - 1])
            made = head.forward(m, flat(slots, following), hidden, step).split([len(s) for s in slots])
            for i, (where, states) in enumerate(zip(slots, made, strict=True)):
                kept[m][i][where.start + 1 : where.stop + 1] = states
    return [[float(kept[m][i][n - 1, 0]) for i, n in enumerate(LENGTHS)] for m in range(num_modules)]


def right_states() -> list[float]:
    found = []
    for tokens in TOKENS:
        sequence = HashSequence()
        for token_id in tokens:
            sequence.append(token_id)
        found.append(float(sequence.state))
    return found


@pytest.mark.parametrize("num_modules", [1, 2, 3])
def test_a_head_that_keeps_everything_is_right(num_modules: int) -> None:
    assert final_states(num_modules) == [right_states()] * num_modules


@pytest.mark.parametrize("slot", range(MIDDLE))
@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("module_idx", [0, 1, 2])
def test_a_key_of_another_token_or_position_shows(module_idx: int, column: int, slot: int) -> None:
    def spoil(own: list[Tensor]) -> None:
        position = STARTS[0] + slot
        page, offset = int(TABLE[0, position // PAGE]), position % PAGE
        own[module_idx][page, 0, 0, offset, column] += 1
        own[module_idx][page, 1, 0, offset, 3 - column] += 1

    states, right = final_states(3, spoil), right_states()
    assert states[module_idx][0] != right[0]
    assert [state[1] for state in states] == [right[1]] * 3, "the other request has nothing to do with it"
    # Modules take only what the one before has left.
    assert [state[0] for state in states[:module_idx]] == [right[0]] * module_idx


def test_what_the_target_had_seen_at_the_first_slot_shows() -> None:
    def spoil(own: list[Tensor]) -> None:
        page, offset = int(TABLE[0, STARTS[0] // PAGE]), STARTS[0] % PAGE
        own[0][page, 0, 0, offset, 2] += 1
        own[0][page, 1, 0, offset, 1] += 1

    assert final_states(1, spoil)[0][0] != right_states()[0]


def test_a_key_that_is_not_there_shows() -> None:
    with pytest.raises(ValueError, match="no token left here"):
        final_states(1, moved=-1)
    with pytest.raises(ValueError, match="no token left here"):
        final_states(1, lambda own: own[0][TABLE[0, 2]].fill_(torch.nan))
