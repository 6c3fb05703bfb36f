"""A step in two halves: the forward pass is launched ahead, and what follows it when the host has brought masks."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.device.interface import Timestamp
from slipstream.plan import StepPlan, StepResult
from slipstream.runner.batch import PreparedBatch
from slipstream.runner.program import LaunchedStep, TargetOutput


@dataclass(frozen=True, slots=True)
class HeldStep:
    """The first half is launched. No other step may be launched before the second half."""

    plan: StepPlan
    batch: PreparedBatch
    target: TargetOutput
    paused: Timestamp | None  # when the device has computed the first half


@dataclass(slots=True)
class ReleasedStep:
    """Both halves are launched."""

    plan: StepPlan
    step: LaunchedStep
    paused: Timestamp | None
    resumed: Timestamp | None  # when the device began the second half

    def collect(self) -> StepResult:
        result = self.step.collect()
        if self.paused is not None and self.resumed is not None:
            result.pause_s = max(0.0, self.resumed() - self.paused())  # both have passed, so nothing is waited for
        return result
