"""What a pass of a draft head takes is embeddings beside states; see ``triton_cases_drafts`` for the kernels."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.kernels.elementwise.rms_norm import rms_norm
from slipstream.kernels.step.draft_states import join_states, keep_states
from tests.kernels.triton_check import quietly_interpreted

needs_triton = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


def test_embeddings_come_first_each_half_by_its_own_norm() -> None:
    hidden, table = torch.randn(4, 8), torch.randn(5, 8)
    ids = torch.tensor([4, 0, 0, 2], dtype=torch.int32)
    gains = torch.randn(2, 8)
    joined = join_states(hidden, table, ids, gains[0], gains[1], 1e-5)
    assert torch.equal(joined[:, :8], rms_norm(table[ids.long()], gains[0], 1e-5))
    assert torch.equal(joined[:, 8:], rms_norm(hidden, gains[1], 1e-5))
    assert torch.equal(join_states(hidden, table, ids, None, None, 1e-5), torch.cat([table[ids.long()], hidden], dim=1))


def test_the_embedding_behind_position_0_is_left_out() -> None:
    hidden, table, gain = torch.randn(3, 8), torch.randn(5, 8), torch.randn(8)
    ids, positions = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 0])
    joined = join_states(hidden, table, ids, gain, gain, 1e-5, positions)
    assert joined[[0, 2], :8].abs().sum() == 0
    assert torch.equal(joined[1], join_states(hidden, table, ids, gain, gain, 1e-5)[1])
    assert table.abs().min() > 0


@pytest.mark.parametrize("as_kernel", [False, pytest.param(True, marks=needs_triton)], ids=["torch", "triton"])
def test_states_are_kept_by_module_and_nothing_else_is_touched(as_kernel: bool) -> None:
    states, indices = torch.randn(6, 3 * 4), torch.tensor([5, 0])
    memory = torch.full((3, 7, 4), -1.0)
    if as_kernel:
        with quietly_interpreted():
            keep_states.body(states, indices, memory[:, :2])
    else:
        keep_states(states, indices, memory[:, :2])
    for module in range(3):
        assert torch.equal(memory[module, :2], states[[5, 0], 4 * module : 4 * module + 4])
    assert (memory[:, 2:] == -1.0).all()


@needs_triton
def test_what_is_only_moved_is_moved_bit_by_bit() -> None:
    hidden = torch.tensor([[-0.0, torch.inf, 1e-45, -torch.nan]])
    with quietly_interpreted():
        joined = join_states.body(hidden, -hidden, torch.zeros(1, dtype=torch.int32), None, None, 1e-5)
    expected = torch.cat([-hidden, hidden], dim=1)
    assert torch.equal(joined.view(torch.int32), expected.view(torch.int32))
