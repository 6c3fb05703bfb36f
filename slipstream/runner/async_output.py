"""A step's results on their way to the host: copied after the compute work, read once their event is complete."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.interface import Device, Event
from slipstream.device.sync_guard import SyncGuard
from slipstream.kernels.step.commit import NUM_HEADER_COLUMNS
from slipstream.output import LogprobRow
from slipstream.plan import RowStatus, StepPlan, StepResult
from slipstream.runner.rings import Ring
from slipstream.sampling.logprobs import LOGPROB_WIDTH, unpack_logprobs

_MAX_VIEWS = 256
_STATUS = {int(status): status for status in RowStatus}  # a table lookup is faster than the enum's


class PromptSpan(NamedTuple):
    """Prompt positions whose log probabilities a step computed for one request."""

    plan_idx: int
    first_position: int
    num_tokens: int


class StepOutput(NamedTuple):
    """A step's results on the device; the next step may overwrite all of them."""

    tokens: Tensor  # [n, NUM_HEADER_COLUMNS + k + 1] int32, as `commit` writes it
    logprobs: Tensor | None  # [num_logits, LOGPROB_WIDTH] int32
    prompt_logprobs: Tensor | None  # [num_tokens of all spans, LOGPROB_WIDTH] int32
    prompt_spans: tuple[PromptSpan, ...] = ()
    next_drafts: Tensor | None = None  # [n, k] int32, for steps with constrained requests


@dataclass(slots=True)
class Channel:
    """A buffer on the device and its copy on the host."""

    on_device: Tensor
    pinned: Tensor
    # Views of the first n entries of both: creating a view takes longer than most of its uses.
    _views: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        views = self._views.get(count)
        if views is None:
            if len(self._views) == _MAX_VIEWS:
                self._views.clear()
            views = self._views[count] = (self.on_device[:count], self.pinned[:count])
        return views

    def stage(self, values: Tensor) -> None:
        self.first(values.shape[0])[0].copy_(values)

    def send(self, device: Device, count: int) -> None:
        on_device, pinned = self.first(count)
        device.copy_async(pinned, on_device)


@dataclass(slots=True)
class _OutputSlot:
    tokens: Channel
    logprobs: Channel
    prompt_logprobs: Channel
    next_drafts: Channel
    computed: Event  # the step has filled the device buffer
    event: Event  # the copy to the host is complete


@dataclass(slots=True)
class InFlightStep:
    """A launched step whose results the host has not read."""

    plan: StepPlan
    slot: _OutputSlot
    has_logprobs: bool
    prompt_spans: tuple[PromptSpan, ...]
    sync_guard: SyncGuard
    has_next_drafts: bool = False

    def collect(self) -> StepResult:
        """Wait for the step, and read its results. The only place where the host waits for the device."""
        start = time.monotonic()
        with self.sync_guard.allow("collect"):
            self.slot.event.synchronize()
        wait_s = time.monotonic() - start
        count = self.plan.composition.num_reqs
        _, pinned = self.slot.tokens.first(count)
        found = pinned.numpy()
        header, tokens = found[:, :NUM_HEADER_COLUMNS], found[:, NUM_HEADER_COLUMNS:]
        statuses, num_drafts, num_accepted, would_accept = header.T.tolist()
        if tokens.shape[1] == 1 or not any(self.plan.composition.num_drafts):
            token_ids = [[token] if token >= 0 else [] for token in tokens[:, 0].tolist()]
        else:
            # Entries after a row's new tokens are not tokens.
            lengths = (tokens >= 0).sum(1).tolist()
            token_ids = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        states = [_STATUS[status] for status in statuses] if any(statuses) else [RowStatus.RUNNING] * count
        result = StepResult(self.plan, token_ids, states, num_drafts, num_accepted, would_accept, wait_s=wait_s)
        if self.has_logprobs:
            result.logprobs = self._logprobs(token_ids)
        if self.has_next_drafts:
            drafts = self.slot.next_drafts.first(count)[1].numpy()
            result.next_drafts = [[d for d in row if d >= 0] for row in drafts.tolist()]
        if self.prompt_spans:
            result.prompt_logprobs = self._prompt_logprobs()
        return result

    def _logprobs(self, token_ids: list[list[int]]) -> list[list[LogprobRow]]:
        """One for each new token: those of a request begin at its first logit."""
        starts = list(itertools.accumulate((1 + k for k in self.plan.composition.num_drafts), initial=0))
        rows = unpack_logprobs(self.slot.logprobs.pinned[: starts[-1]].numpy())
        return [rows[start : start + len(own)] for start, own in zip(starts, token_ids, strict=False)]

    def _prompt_logprobs(self) -> dict[int, tuple[int, list[LogprobRow]]]:
        found, start = {}, 0
        for span in self.prompt_spans:
            packed = self.slot.prompt_logprobs.pinned[start : start + span.num_tokens].numpy()
            found[span.plan_idx] = (span.first_position, unpack_logprobs(packed))
            start += span.num_tokens
        return found


class OutputRing:
    """Output slots, one more than steps in flight: a step never overwrites results that were not read."""

    def __init__(self, device: Device, max_reqs: int, num_drafts: int, max_tokens: int, depth: int) -> None:
        self._device = device

        def channel(*shape: int) -> Channel:
            return Channel(
                torch.zeros(shape, dtype=torch.int32, device=device.torch_device),
                device.pinned_empty(shape, torch.int32),
            )

        self._ring = Ring(
            [
                _OutputSlot(
                    channel(max_reqs, NUM_HEADER_COLUMNS + 1 + num_drafts),
                    channel(max_reqs * (1 + num_drafts), LOGPROB_WIDTH),
                    channel(max_tokens, LOGPROB_WIDTH),
                    channel(max_reqs, num_drafts),
                    device.event(),
                    device.event(),
                )
                for _ in range(depth)
            ]
        )

    def send(self, plan: StepPlan, output: StepOutput) -> InFlightStep:
        """Queue the copy of the results to the host.

        Tokens are few bytes and are copied in the step's own stream: another stream would save the device two
        microseconds and cost the host forty. Log probabilities are many: they go through the slot's own memory.
        """
        device, slot = self._device, self._ring.acquire()
        if output.logprobs is None and output.prompt_logprobs is None:
            count = output.tokens.shape[0]
            device.copy_async(slot.tokens.first(count)[1], output.tokens)
            if output.next_drafts is not None:
                device.copy_async(slot.next_drafts.first(count)[1], output.next_drafts)
            slot.event.record(device.compute_stream)
            return InFlightStep(plan, slot, False, (), device.sync_guard, output.next_drafts is not None)
        used = [(slot.tokens, output.tokens)]
        if output.next_drafts is not None:
            used.append((slot.next_drafts, output.next_drafts))
        if output.logprobs is not None:
            used.append((slot.logprobs, output.logprobs))
        if output.prompt_logprobs is not None:
            used.append((slot.prompt_logprobs, output.prompt_logprobs))
        for channel, values in used:
            channel.stage(values)
        slot.computed.record(device.compute_stream)
        with device.use_stream(device.copy_stream):
            device.copy_stream.wait_event(slot.computed)
            for channel, values in used:
                channel.send(device, values.shape[0])
            slot.event.record(device.copy_stream)
        has_logprobs, has_drafts = output.logprobs is not None, output.next_drafts is not None
        return InFlightStep(plan, slot, has_logprobs, output.prompt_spans, device.sync_guard, has_drafts)
