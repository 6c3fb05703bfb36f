from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from slipstream.device.cpu import CpuDevice, CpuEvent
from slipstream.runner.async_output import OutputRing
from slipstream.runner.rings import Ring
from slipstream.types import RowStatus, ScheduledRequest, StepPlan


@dataclass
class Busy(CpuEvent):
    done: bool = True

    def query(self) -> bool:
        return self.done


@dataclass
class Slot:
    event: Busy = field(default_factory=Busy)


def test_slots_come_in_turn_and_a_busy_one_is_never_handed_out() -> None:
    ring = Ring([Slot(), Slot()])
    first, second = ring.acquire(), ring.acquire()
    assert first is not second and ring.acquire() is first
    second.event.done = False
    with pytest.raises(RuntimeError, match="ring of 2 slots is full"):
        ring.acquire()


def test_outputs_survive_the_next_step_overwriting_its_buffer() -> None:
    outputs = OutputRing(CpuDevice(), max_reqs=4, depth=2)
    plan = StepPlan(0, [ScheduledRequest(name, 1, row, 1, 0, True) for row, name in enumerate("ab")])
    out = torch.tensor([[5, 0], [-1, 3]], dtype=torch.int32)
    step = outputs.send(plan, out)
    out.fill_(99)
    outputs.send(plan, out)
    result = step.collect()
    assert result.token_ids == [[5], []] and result.statuses == [RowStatus.RUNNING, RowStatus.ERROR]
