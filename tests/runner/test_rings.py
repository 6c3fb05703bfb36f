from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from slipstream.device.cpu import CpuDevice, CpuEvent
from slipstream.runner.async_output import OutputRing, PromptSpan, StepOutput
from slipstream.runner.rings import Ring
from slipstream.sampling.logprobs import pack_logprobs
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
    outputs = OutputRing(CpuDevice(), max_reqs=4, max_tokens=8, depth=2)
    plan = StepPlan(0, [ScheduledRequest(name, 1, row, 1, 0, True) for row, name in enumerate("ab")])
    out = torch.tensor([[5, 0], [-1, 3]], dtype=torch.int32)
    logits = torch.randn(2, 30)
    logprobs, prompt_logprobs = pack_logprobs(logits, torch.tensor([5, 1])), pack_logprobs(logits, torch.tensor([7, 8]))
    step = outputs.send(plan, StepOutput(out, logprobs, prompt_logprobs, (PromptSpan(1, 3, 2),)))
    for buffer in (out, logprobs, prompt_logprobs):
        buffer.fill_(99)
    outputs.send(plan, StepOutput(out, logprobs, None))
    result = step.collect()
    assert result.token_ids == [[5], []] and result.statuses == [RowStatus.RUNNING, RowStatus.ERROR]
    assert result.logprobs is not None and [len(rows) for rows in result.logprobs] == [1, 0]
    assert result.logprobs[0][0].token_ids[0] == 5
    position, rows = result.prompt_logprobs[1]
    assert position == 3 and [row.token_ids[0] for row in rows] == [7, 8]
