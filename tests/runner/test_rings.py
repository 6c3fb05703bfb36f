from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from slipstream.device.cpu import CpuDevice, CpuEvent
from slipstream.plan import RowStatus, ScheduledRequest, StepPlan
from slipstream.runner.async_output import OutputRing, PromptSpan, StepOutput
from slipstream.runner.rings import Ring
from slipstream.sampling.logprobs import pack_logprobs


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
    outputs = OutputRing(CpuDevice(), max_reqs=4, num_drafts=2, max_tokens=8, depth=2)
    plan = StepPlan.from_requests(0, [ScheduledRequest(name, 1, row, 3, 0, True, 2) for row, name in enumerate("abc")])
    # Status, drafts, accepted, would_accept, tokens.
    rows = [[0, 2, 1, 0, 5, 6, -1], [3, 1, 0, 0, -1, -1, -1], [0, 0, 0, 1, 4, -1, -1]]
    out = torch.tensor(rows, dtype=torch.int32)
    logits = torch.randn(9, 30)
    logprobs = pack_logprobs(logits, torch.tensor([5, 6, 7, 1, 1, 1, 4, 1, 1]))
    prompt_logprobs = pack_logprobs(logits[:2], torch.tensor([7, 8]))
    step = outputs.send(plan, StepOutput(out, logprobs, prompt_logprobs, (PromptSpan(1, 3, 2),)))
    for buffer in (out, logprobs, prompt_logprobs):
        buffer.fill_(99)
    outputs.send(plan, StepOutput(out, logprobs, None))
    result = step.collect()
    assert result.token_ids == [[5, 6], [], [4]]
    assert result.statuses == [RowStatus.RUNNING, RowStatus.ERROR, RowStatus.RUNNING]
    assert (result.num_drafts, result.num_accepted) == ([2, 1, 0], [1, 0, 0])
    assert result.would_accept == [0, 0, 1]
    assert result.logprobs is not None
    assert [[row.token_ids[0] for row in own] for own in result.logprobs] == [[5, 6], [], [4]]
    position, scored = result.prompt_logprobs[1]
    assert position == 3 and [row.token_ids[0] for row in scored] == [7, 8]
