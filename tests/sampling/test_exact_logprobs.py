"""Log probabilities of exact mode: the values of the usual ones, and a row's own whatever rows are beside it."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.sampling.exact_logprobs import pack_exact_logprobs
from slipstream.sampling.logprobs import unpack_logprobs
from tests.kernels.order_revealing import order_revealed


def drawn(num_rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return 3 * torch.randn(num_rows, vocab_size), torch.randint(0, vocab_size, (num_rows,))


@pytest.mark.parametrize("vocab_size", [5, 1003, 5000])
@pytest.mark.parametrize("as_kernel", [False, True])
def test_values_are_those_of_float64(vocab_size: int, as_kernel: bool) -> None:
    logits, ids = drawn(3, vocab_size)
    logits[1, 2] = -torch.inf
    if not as_kernel:
        packed = pack_exact_logprobs(logits, ids)
    elif not triton_jit.is_available():
        return
    else:
        with order_revealed():
            packed = pack_exact_logprobs.body(logits, ids)
    expected = logits.double().log_softmax(1)
    for row, wide, token in zip(unpack_logprobs(packed.numpy()), expected, ids.tolist(), strict=True):
        num_top = min(20, vocab_size)
        order = wide.argsort(descending=True, stable=True)[:num_top]
        assert row.token_ids[0] == token and row.token_ids[1 : 1 + num_top] == order.tolist()
        assert row.rank == 1 + int((wide > wide[token]).sum())
        found = torch.tensor(row.values[: 1 + num_top], dtype=torch.float64)
        torch.testing.assert_close(found, torch.cat([wide[token : token + 1], wide[order]]), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("as_kernel", [False, True])
def test_a_row_does_not_depend_on_the_others(as_kernel: bool) -> None:
    if as_kernel and not triton_jit.is_available():
        return
    logits, ids = drawn(40, 4099)
    packed = []
    for rows in (slice(0, 40), slice(17, 18), slice(11, 24)):
        if as_kernel:
            with order_revealed():
                packed.append(pack_exact_logprobs.body(logits[rows].clone(), ids[rows]))
        else:
            packed.append(pack_exact_logprobs(logits[rows].clone(), ids[rows]))
    assert torch.equal(packed[0][17:18], packed[1]) and torch.equal(packed[0][11:24], packed[2])


def test_equal_values_come_by_id() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 250] = 1.0
    (row,) = unpack_logprobs(pack_exact_logprobs(logits, torch.tensor([7])).numpy())
    assert row.token_ids == [7, 250, *range(19)]
    assert row.rank == 2, "equal ones share a rank"


def test_no_rows() -> None:
    assert pack_exact_logprobs(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64)).shape[0] == 0
