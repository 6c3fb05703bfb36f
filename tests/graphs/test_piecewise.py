from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer, Caps
from slipstream.attention.context import AttentionContext
from slipstream.attention.grouped_query import NewHeads
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.sim import SimDevice
from slipstream.graphs.piecewise import PiecewiseForward
from tests.contexts import context_of

LAYERS = [AttentionLayer(idx, 1, 1, 2, 1.0) for idx in range(3)]


class AddBackend:
    """Attention that adds a number of the step: no graph could know it."""

    caps: ClassVar[Caps] = Caps(dtypes=("float32",), host_lengths="none", graph_support="never")

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def build(self, common: CommonAttentionMetadata) -> float:
        return float(common.max_query_len)

    def run(self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        return q + metadata * (layer.idx + 1)


def make_context(device: SimDevice, caches: list[Tensor], query_len: int) -> AttentionContext:
    device_, backend = device.torch_device, AddBackend()
    positions = torch.zeros(4, dtype=torch.int64, device=device_)
    slots = torch.full((4,), -1, dtype=torch.int64, device=device_)
    one = torch.zeros(2, dtype=torch.int32, device=device_)
    common = CommonAttentionMetadata(
        num_reqs=1,
        num_actual_tokens=query_len,
        max_query_len=query_len,
        query_start_loc=one,
        query_start_loc_cpu=np.array([0, query_len], dtype=np.int32),
        query_lens=one[:1],
        seq_lens=one[:1],
        seq_lens_cpu_upper_bound=np.array([4], dtype=np.int32),
        block_table=one.unsqueeze(0),
        slot_mapping=slots,
    )
    return context_of(backend, backend.build(common), caches, positions, slots)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_replayed_and_attention_is_launched(seed: int) -> None:
    device = SimDevice(seed)
    x = torch.zeros(4, 2, device=device.torch_device)
    cos_sin = torch.zeros(8, 2, 1, device=device.torch_device)
    cos_sin[:, 0].fill_(1.0)
    caches = [torch.zeros(3, 2, 1, 4, 2, device=device.torch_device) for _ in LAYERS]

    def forward(context: AttentionContext) -> Tensor:
        hidden = x * 2
        for layer in LAYERS:
            q = hidden.unsqueeze(1)
            hidden = context.run(layer, NewHeads(q, q, q, cos_sin)).flatten(1) * 10
        return hidden + 1

    pieces = PiecewiseForward(device, device.graph_pool())
    with torch.inference_mode():
        pieces.record(forward, make_context(device, caches, 1))
        assert len(pieces.breaks) == len(LAYERS)
        for start, query_len in ((0.0, 1), (1.0, 2), (3.0, 4)):
            x.fill_(start)
            out = pieces.replay(make_context(device, caches, query_len))
            expected = start * 2
            for layer in LAYERS:
                expected = (expected + query_len * (layer.idx + 1)) * 10
            assert device.peek(out).tolist() == [[expected + 1] * 2] * 4
