"""What layers with states are told of a step: any mix of kinds, padded, from host numbers alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from slipstream.attention.gdn import GDNAttentionMetadata, Parts
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.device.sim import SimDevice
from tests.device.sim_setup import upload

NUM_DRAFTS, SCRATCH_ROW = 3, 9
NUM_STATES = 1 + NUM_DRAFTS


class Scheduled(NamedTuple):
    """A request in a step."""

    row: int
    num_tokens: int
    num_drafts: int = 0
    num_alive: int = 1
    num_computed: int = 5


SPEC = [Scheduled(4, 4, 3, 3), Scheduled(1, 4, 3, 1, 20)]  # with two drafts that were made, and with none
PLAIN = [Scheduled(2, 1), Scheduled(7, 1, num_alive=0, num_computed=0)]  # the second has ended since
PREFILL = [Scheduled(3, 12, num_alive=12, num_computed=0), Scheduled(0, 3, num_alive=3, num_computed=8)]


def step(requests: list[Scheduled], device: SimDevice, padding: int = 0) -> CommonAttentionMetadata:
    def there(values: list[int]) -> torch.Tensor:
        return upload(device, torch.tensor(values, dtype=torch.int32))

    starts = np.concatenate([[0], np.cumsum([r.num_tokens for r in requests])]).astype(np.int32)
    alive = [r.num_alive for r in requests]
    lengths = [r.num_computed + r.num_alive if r.num_alive else 0 for r in requests]
    num_tokens = int(starts[-1])
    return CommonAttentionMetadata(
        num_reqs=len(requests),
        num_actual_tokens=num_tokens,
        max_query_len=max(r.num_tokens for r in requests),
        query_start_loc=there([*starts.tolist(), *[num_tokens] * padding]),
        query_start_loc_cpu=starts,
        query_lens=there([*alive, *[0] * padding]),
        seq_lens=there([*lengths, *[0] * padding]),
        seq_lens_cpu_upper_bound=np.array(lengths, dtype=np.int32),
        block_table=there([0]).view(1, 1),
        slot_mapping=there([0] * num_tokens).long(),
        batch_rows=there([*(r.row for r in requests), *[SCRATCH_ROW] * padding]),
        num_drafts_cpu=np.array([r.num_drafts for r in requests], dtype=np.int32),
    )


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    "requests",
    [
        SPEC,
        PLAIN,
        PREFILL,
        SPEC + PLAIN,
        SPEC + PREFILL,
        PLAIN + PREFILL,
        SPEC + PLAIN + PREFILL,
        SPEC[:1],
        PREFILL[1:],
    ],
    ids=lambda requests: " ".join(str(r.num_tokens) for r in requests),
)
def test_every_mix_is_built_without_a_wait(requests: list[Scheduled], padding: int) -> None:
    device = SimDevice(0)
    common = step(requests, device, padding)
    with device.sync_guard.forbid():
        built = GDNAttentionMetadata.build(common, NUM_STATES)
    assert built.spec_sequence_masks_cpu.device.type == "cpu"
    assert built.spec_sequence_masks_cpu.tolist() == [r in SPEC for r in requests]
    kinds = (SPEC, PLAIN, PREFILL)
    expected = [[r.num_tokens for r in requests if r in kind] for kind in kinds]
    assert [built.spec_decodes, built.decodes, built.prefills] == [Parts(len(e), sum(e)) for e in expected]
    assert built.in_chunks == (PREFILL[0] in requests)
    assert built.max_count == max(r.num_tokens for r in requests)
    begins = [r.num_computed if r.num_alive else 0 for r in requests]
    assert device.peek(built.slots).tolist() == [r.row for r in requests] + [SCRATCH_ROW] * padding
    assert device.peek(built.positions).tolist() == begins + [0] * padding
    assert device.peek(built.counts).tolist() == [r.num_alive for r in requests] + [0] * padding
    starts = common.query_start_loc_cpu.tolist()
    assert device.peek(built.starts).tolist() == starts[:-1] + [starts[-1]] * padding


def test_without_drafts_no_request_speculates() -> None:
    device = SimDevice(0)
    common = step(PLAIN + PREFILL, device)
    no_drafts = CommonAttentionMetadata(
        **{name: getattr(common, name) for name in common.__dataclass_fields__ if name != "num_drafts_cpu"}
    )
    built = GDNAttentionMetadata.build(no_drafts, 1)
    assert not built.spec_sequence_masks_cpu.any()
    assert (built.spec_decodes, built.decodes) == (Parts(0, 0), Parts(2, 2))
    assert built.in_chunks
