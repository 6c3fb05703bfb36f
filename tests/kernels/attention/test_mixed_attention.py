"""Decodes and prompts of a step, each by its own kernel: drawn batches against a sum over the slots each token sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.backends.triton import TritonBackend
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.kernels import triton_jit
from tests.attention.mixed_batches import DIM, HEADS, KV_HEADS, draw_batch, draw_values
from tests.kernels.attention.dense_attention import dense_attention
from tests.kernels.triton_check import TOLERANCE, quietly_interpreted

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
LAYER = AttentionLayer(0, HEADS, KV_HEADS, DIM, DIM**-0.5)


def attend(
    common: CommonAttentionMetadata, q: torch.Tensor, cache: torch.Tensor, kind: str, window: int = 0
) -> torch.Tensor:
    backend, layer = TritonBackend(kind), replace(LAYER, window=window)
    with quietly_interpreted():
        return backend.run(layer, q, cache, backend.build(common))


def batch_of_both_kinds(seed: int, query_len: int) -> CommonAttentionMetadata:
    drawn = (draw_batch(1000 * seed + i, 4, query_len) for i in range(100))
    return next(common for common in drawn if 0 < common.num_decodes < common.num_reqs)


@pytest.mark.parametrize(("seed", "query_len", "window"), [(0, 1, 0), (1, 4, 0), (2, 3, 40)])
def test_drawn_batches(seed: int, query_len: int, window: int) -> None:
    torch.manual_seed(seed)
    common = batch_of_both_kinds(seed, query_len)
    q, cache = (values.float() for values in draw_values(common))
    expected = dense_attention(q, cache, *common.requests[:4], LAYER.scale, window)
    tolerance = TOLERANCE[torch.float32]
    for kind in ("apart", "together"):
        found = attend(common, q, cache, kind, window).double()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_decode_does_not_depend_on_the_prompts_beside_it() -> None:
    """Bit for bit: its keys are split at the same positions in a step with prompts and in one without."""
    torch.manual_seed(0)
    common = batch_of_both_kinds(5, 2)
    q, cache = (values.float() for values in draw_values(common))
    num_reqs, num_tokens = common.num_decodes, 2 * common.num_decodes
    alone = replace(
        common,
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=2,
        query_start_loc=common.query_start_loc[: num_reqs + 1],
        query_start_loc_cpu=common.query_start_loc_cpu[: num_reqs + 1],
        query_lens=common.query_lens[:num_reqs],
        seq_lens=common.seq_lens[:num_reqs],
        block_table=common.block_table[:num_reqs],
        slot_mapping=common.slot_mapping[:num_tokens],
    )
    both = attend(common, q, cache, "apart")[:num_tokens]
    assert torch.equal(both, attend(alone, q[:num_tokens], cache, "apart"))


def test_a_batch_is_taken_apart_only_where_the_host_knows_its_kinds() -> None:
    common = batch_of_both_kinds(0, 3)
    backend = TritonBackend("apart")
    parts = backend.build(common).parts
    assert parts is not None and parts.query_len == 3
    assert len(parts.decodes.seq_lens) == common.num_decodes
    for other in (
        replace(common, num_decodes=0),  # a recording
        replace(common, num_decodes=common.num_reqs),
        replace(common, is_causal=False),
    ):
        assert backend.build(other).parts is None
    starts = torch.arange(common.num_reqs, dtype=torch.int32)
    later = backend.starting_at(backend.build(common), starts).parts
    assert later is not None and later.prompts.seq_starts is not None
    assert later.prompts.seq_starts.tolist() == starts[common.num_decodes :].tolist()
