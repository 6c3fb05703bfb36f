"""Graphs of whole steps: which parts of a step a descriptor records, and how a batch runs through one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.device.interface import Device
from slipstream.graphs.descriptor import AttentionState, BatchExecutionDescriptor, GraphKind, Tier
from slipstream.graphs.manager import CudaGraphManager, Forward, GraphMemory
from slipstream.graphs.mode import CUDAGraphMode, usable_mode
from slipstream.graphs.piecewise import PiecewiseForward
from slipstream.runner.input_batch import InputBatch
from slipstream.runner.program import StepProgram, TargetOutput
from slipstream.runner.recent import Recent
from slipstream.runner.step_timing import seconds_of_a_step
from slipstream.sampling.sampler import NO_NEEDS, NOISE_ALONE, SamplingNeeds
from slipstream.speculate.speculator import GraphSetting

# Tokens of mixed batches that are recorded before the first step; where many decode, up to twice as many as those.
_SMALLEST_MIXED, _LARGEST_MIXED = 16, 512
# What a graph with sampling inside can do: greedy and noise at any temperature, row by row.
_FAST_NEEDS = NOISE_ALONE
# Of the device's memory, for what is recorded when idle, beside what the first steps have needed.
_IDLE_GRAPH_BYTES = 2 << 30
_MAX_DECODE_TOKENS = 512  # of graphs for other draft lengths than the first: beyond, drafts do not pay on any GPU
_MAX_MEASURED = 16  # requests, where steps are launched one operation at a time

OnCost = Callable[[int, int, float], None]  # requests, drafts of each, seconds


def _as_many(num_checked: int) -> int:
    return num_checked


class DraftSizes(NamedTuple):
    """How many drafts a step may have, fewest first, and how many the first steps have."""

    lengths: Sequence[int]
    initial: int
    foresees: bool = False  # who makes a draft to see what it is worth does not check it
    num_made: Callable[[int], int] = _as_many  # by a step, where the next one checks so many

    def kinds(self) -> list[GraphKind]:
        """Every graph that a step could use.

        A step whose number of drafts stays runs whole, and so does one that tries the next longer length, or comes back
        from that. Any other has a graph for the target, and one for what the drafter does.
        """
        lengths, made = sorted({0, *self.lengths}), self.num_made
        kinds = [GraphKind(1 + k, "fast", made(k)) for k in lengths]
        for a, b in itertools.pairwise(lengths) if len(self.lengths) > 1 else ():
            kinds += [GraphKind(1 + a, "fast", made(b))]
            if a or not self.foresees:
                kinds += [GraphKind(1 + b, "fast", made(a))]
        beside = {made(k) for k in {0, self.initial} & {self.initial, *self.lengths}}
        kinds += [GraphKind(None, "fast", k) for k in sorted(beside)]
        # Where as many are made whatever is checked, several of these are one.
        return [*dict.fromkeys(kinds), *(GraphKind(1 + k, "full") for k in lengths), GraphKind(None, "full")]

    def order(self, desc: BatchExecutionDescriptor, largest_decode: int) -> int | None:
        """0 for what most first requests need: sampling inside, and sizes of which any batch fits one at twice its own.

        The rest is recorded when the engine is idle, what adapting wants first; until then such batches run in a larger
        graph or launch by launch. Sizes between powers of two are for the usual kinds alone.
        """
        is_mixed, is_fast = desc.query_len is None, desc.tier == "fast"
        size = desc.num_tokens if is_mixed else desc.num_reqs
        is_usual = is_mixed or desc.query_len == 1 + self.initial
        if size & (size - 1) and (is_mixed or size != largest_decode):
            return 4 if is_usual or (desc.query_len == 1 and desc.num_drafts <= self._shortest) else None
        if is_mixed:
            if size > max(_LARGEST_MIXED, 2 * largest_decode):
                return 4  # they take much memory
            is_first = is_fast and desc.num_drafts == self.num_made(self.initial)
            return 0 if is_first and size >= _SMALLEST_MIXED else 1 if is_fast else 2
        assert desc.query_len is not None
        num_checked = desc.query_len - 1
        # Of no use without the steps before and behind it.
        behind = [k for k in {0, *self.lengths} if self.num_made(k) == desc.num_drafts]
        if not self._is_worth_it(size, num_checked) or not any(self._is_worth_it(size, k) for k in behind):
            return None
        if not is_fast:
            return 1 if is_usual else 3
        if desc.num_drafts == self.num_made(num_checked):
            return 0 if is_usual else 1 if num_checked == 0 else 2
        return 1 if {num_checked, desc.num_drafts} == {0, self._shortest} else 3

    @property
    def _shortest(self) -> int:
        """What a step makes that begins with drafts."""
        return self.num_made(min((k for k in self.lengths if k), default=0))

    def _is_worth_it(self, num_reqs: int, num_checked: int) -> bool:
        return num_checked in (0, self.initial) or num_reqs * (1 + num_checked) <= _MAX_DECODE_TOKENS


@dataclass(frozen=True, slots=True)
class Drafting:
    """A step has requests to draft for."""

    noise: bool  # one of them is not greedy
    makes: bool = True  # drafts, behind this step; otherwise the drafter only wants to see it


class _Choice(NamedTuple):
    """The graph for a batch. As long as the same batch comes again, it is the same."""

    needs: SamplingNeeds
    drafting: Drafting | None
    desc: BatchExecutionDescriptor
    hidden: Tensor | None  # where a recording that does all of the step leaves its hidden states
    silent: BatchExecutionDescriptor | None  # the same graph, where nothing is proposed in it


class StepGraphs:
    """Recorded steps of one runner. Without graphs every batch runs at its own size, launch by launch."""

    def __init__(
        self,
        device: Device,
        program: StepProgram,
        mode: CUDAGraphMode,
        sizes: Sequence[int],
        max_num_reqs: int,
        drafts: DraftSizes,
        logits: Tensor,  # [most logits of a step, vocab], where graphs without sampling leave theirs
        on_cost: OnCost | None,  # wants to know what a step costs
    ) -> None:
        self._device = device
        self._program = program
        self.mode = usable_mode(mode, program.caches.caps)
        self._drafts = drafts
        self._follower = program.speculator.follower
        self._on_cost = on_cost
        largest = max((size for size in sizes if size <= max_num_reqs), default=0)
        self.memory = GraphMemory(device)
        self._manager = CudaGraphManager(
            device,
            self.mode,
            sizes,
            max_num_reqs,
            kinds=drafts.kinds(),
            order=lambda desc: drafts.order(desc, largest),
            memory=self.memory,
        )
        # Steps without graphs whose cost is still to be measured.
        self._unmeasured: list[tuple[int, int]] = []
        self._unmeasured_graphs: deque[BatchExecutionDescriptor] = deque()  # whose timing gave way to a request
        if on_cost is not None and self.mode.decode_mode() is not CUDAGraphMode.FULL:
            powers = itertools.takewhile(lambda n: n <= min(max_num_reqs, _MAX_MEASURED), (1 << i for i in range(16)))
            self._unmeasured = [(n, k) for n in powers for k in drafts.lengths]
        # Where each recording leaves its hidden states. Logits are large: all recordings that leave any share memory.
        self._hidden: dict[BatchExecutionDescriptor, Tensor] = {}
        self._batches: dict[BatchExecutionDescriptor, InputBatch] = {}
        self._logits = logits
        self._pieces: dict[BatchExecutionDescriptor, PiecewiseForward] = {}
        self._is_complete = False
        self._capture_drafter: Callable[[], bool] | None = None  # one more graph of its own
        self._choices: Recent[InputBatch, _Choice] = Recent()
        if self.mode is not CUDAGraphMode.NONE:
            buffers = program.buffers
            self._capture_drafter = program.speculator.init_graphs(
                GraphSetting(
                    device,
                    self.mode,
                    sizes,
                    drafts.lengths,
                    max_num_reqs,
                    buffers.max_model_len,
                    self._manager.pool,
                    self.memory,
                    program.caches,
                    buffers.no_drafting,
                    lambda desc: buffers.static(desc).drafting,
                    lambda desc: buffers.prepare(buffers.static(desc)),
                    self._manager.states.get,
                )
            )

    @property
    def num_recorded(self) -> int:
        """Graphs of whole steps and of the target; a drafter's own are not counted."""
        return self._manager.num_recorded

    @property
    def num_missing(self) -> int:
        """Above 0 until idle time has found nothing left to do, a drafter's graphs and all measurements included."""
        num_left = self._manager.num_missing + len(self._unmeasured) + len(self._unmeasured_graphs)
        return max(num_left, int(not self._is_complete))

    @torch.inference_mode()
    def capture(self) -> None:
        for desc in self._manager.capture(self._create_forward, "recording graphs"):
            self._measure(desc)
        self.memory.limit = self.memory.used + _IDLE_GRAPH_BYTES
        while self._unmeasured and self._unmeasured[0][0] == 1:  # a second or so; the others when idle
            self._measure_launches(*self._unmeasured.pop(0))

    @torch.inference_mode()
    def capture_one_more(self, is_wanted: Callable[[], bool] = lambda: False) -> bool:
        """With nothing else to do. A warm-up really runs, so the last step's batch must not be there any more.

        Timing a step gives way as soon as ``is_wanted``, and is begun again the next time.
        """
        if self._is_complete:
            return False
        self._choices.clear()
        program = self._program
        with self._waiting():  # nobody else does, if there turns out to be nothing to record
            if self._follower is not None:
                self._follower.settle()
            program.buffers.stage_nothing()
            # Kernels are compiled in a run that fills nothing, where libraries' own would read what another step left.
            own = (program.caches.step_buffers(), program.speculator.step_buffers())
            for buffer in (*program.buffers.of_a_step(), *itertools.chain(*own)):
                buffer.zero_()
        if self._unmeasured_graphs:
            if self._measure(self._unmeasured_graphs[0], is_wanted):
                self._unmeasured_graphs.popleft()
        elif (desc := self._manager.capture_one_more(self._create_forward)) is not None:
            if not self._measure(desc, is_wanted):
                self._unmeasured_graphs.append(desc)
        elif self._unmeasured:
            if self._measure_launches(*self._unmeasured[0], is_wanted):
                self._unmeasured.pop(0)
        else:
            self._is_complete = self._capture_drafter is None or not self._capture_drafter()
        return not self._is_complete

    def _measure(self, desc: BatchExecutionDescriptor, is_wanted: Callable[[], bool] = lambda: False) -> bool:
        """What a step in this graph costs, if steps of its kind follow each other. False if it had to give way."""
        if self._on_cost is None or desc.query_len is None or desc.tier != "fast":
            return True
        num_checked = desc.query_len - 1
        if desc.num_drafts == self._drafts.num_made(num_checked) and desc.mode is CUDAGraphMode.FULL:
            return self._time(desc.num_reqs, num_checked, lambda: self._manager.replay(desc), is_wanted)
        return True

    def _measure_launches(self, num_reqs: int, num_drafts: int, is_wanted: Callable[[], bool] = lambda: False) -> bool:
        program, query_len, num_made = self._program, 1 + num_drafts, self._drafts.num_made(num_drafts)
        desc = BatchExecutionDescriptor(CUDAGraphMode.NONE, num_reqs * query_len, num_reqs, query_len, "fast", num_made)
        batch = program.buffers.static(desc)
        with self._device.use_stream(self._device.compute_stream):
            program.buffers.stage_nobody(num_reqs, query_len)

        def run() -> None:
            # Without noise: on a CPU it costs as much as a draft, and who draws some is put right by real steps.
            target = program.target(batch, num_drafts > 0 or self._follower is not None)
            program.finish(batch, target.logits, NO_NEEDS)
            if num_drafts:
                program.draft(batch.drafting, noise=False, in_graph=True)
            elif self._follower is not None:
                self._follower.run(batch.drafting)

        is_timed = self._time(num_reqs, num_drafts, run, is_wanted)
        with self._waiting():
            program.buffers.stage_nothing()
        return is_timed

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Nothing else runs, and what is launched inside has ended when the context has."""
        device = self._device
        with device.use_stream(device.compute_stream), device.sync_guard.allow("measure"), device.warm_up():
            yield

    def _time(self, num_reqs: int, num_drafts: int, run: Callable[[], None], is_wanted: Callable[[], bool]) -> bool:
        """Over padding: keys that are not there are not read, everything else is as in a step."""
        with self._waiting(), self._program.buffers.padding_of_many_tokens():
            seconds = seconds_of_a_step(self._device, run, is_wanted)
        if seconds is None:
            return False
        assert self._on_cost is not None
        self._on_cost(num_reqs, num_drafts, seconds)
        return True

    def run(self, batch: InputBatch, needs: SamplingNeeds, drafting: Drafting | None) -> tuple[Tensor, Tensor | None]:
        """A step over staged rows: hidden states, and log probabilities if a request wants them."""
        choice = self._choices.get(batch)
        if choice is None or choice.needs is not needs or choice.drafting is not drafting:
            choice = self._choices.put(batch, self._choose(batch, needs, drafting))
        program, desc = self._program, choice.desc
        if self._follower is not None:
            self._follower.begin_step(batch, choice.silent)
        if desc.mode is CUDAGraphMode.FULL:
            self._manager.replay(desc)
            if choice.hidden is not None:
                return choice.hidden, None
            padded, target = self._batches[desc], TargetOutput(self._hidden[desc], self._logits)
        elif desc.mode is CUDAGraphMode.PIECEWISE:
            padded = program.buffers.pad(batch, desc)
            program.buffers.prepare(padded)
            target = program.with_logits(padded, self._pieces[desc].replay(program.context(padded, True)))
        else:
            padded, target = batch, program.target(batch, drafting is not None)
        logprobs = program.finish(padded, target.logits[: padded.logit_indices.shape[0]], needs)
        if drafting is not None:
            # In pieces the drafter's first pass may be padded as the target's; the device's padding is there.
            in_pieces = desc.mode is CUDAGraphMode.PIECEWISE
            drafted = (padded if in_pieces else batch).drafting.behind(desc)
            if drafting.makes:
                program.draft(drafted, drafting.noise, in_graph=False)
            elif self._follower is not None:
                self._follower.run(drafted)
        return target.hidden, logprobs

    def _choose(self, batch: InputBatch, needs: SamplingNeeds, drafting: Drafting | None) -> _Choice:
        common = batch.attention
        num_reqs, num_tokens, query_len = common.num_reqs, common.num_actual_tokens, batch.decode_len
        tier: Tier = "fast" if (needs | _FAST_NEEDS) == _FAST_NEEDS else "full"
        num_drafts = batch.drafting.num_drafts if drafting and tier == "fast" else 0
        if batch.drafting.num_caught_up:  # no recording has room for that
            tier, num_drafts = "full", 0
        inside = not common.num_common_pages  # that number changes from batch to batch; recordings have none
        desc = self._manager.dispatch(num_reqs, num_tokens, query_len, tier, num_drafts, inside)
        if desc.mode is CUDAGraphMode.NONE and tier == "fast":
            # No graph holds all of the step; the target may have one.
            desc = self._manager.dispatch(num_reqs, num_tokens, query_len, "full", attention_inside=inside)
        is_whole = desc.mode is CUDAGraphMode.FULL and desc.tier == "fast"
        silent = desc if is_whole and not desc.num_drafts else None
        return _Choice(needs, drafting, desc, self._hidden[desc] if is_whole else None, silent)

    def _create_forward(self, desc: BatchExecutionDescriptor, *, warmup: bool) -> Forward:
        program = self._program
        batch = program.buffers.static(desc)
        state = AttentionState(batch)
        # Who is drafted for, the target's own graph does not know.
        taps = desc.num_drafts > 0 or desc.tier == "full" or self._follower is not None

        def run_pieces() -> None:
            program.buffers.prepare(batch)
            context = program.context(batch, taps)
            state.metadata = context.shared
            if warmup:
                program.model.forward(batch.input_ids, context)
            else:
                pieces = self._pieces[desc] = PiecewiseForward(self._device, self._manager.pool)
                pieces.record(lambda own: program.model.forward(batch.input_ids, own), context)

        def run_whole() -> None:
            program.buffers.prepare(batch)
            context = program.context(batch, taps)
            state.metadata = context.shared
            hidden, logits = program.with_logits(batch, program.model.forward(batch.input_ids, context))
            if desc.tier == "full":
                self._logits[: logits.shape[0]].copy_(logits)
                # What follows is launched, but compiled by then: a change of the draft length may come this way.
                for needs in (NO_NEEDS, _FAST_NEEDS) if warmup else ():
                    program.finish(batch, logits, needs)
            else:
                program.finish(batch, logits, _FAST_NEEDS)
                if desc.num_drafts:
                    program.draft(batch.drafting, noise=True, in_graph=True)
                elif self._follower is not None:
                    self._follower.record(batch.drafting, desc, warmup=warmup)
            if not warmup:
                self._hidden[desc], self._batches[desc] = hidden, batch

        return Forward(run_pieces if desc.mode is CUDAGraphMode.PIECEWISE else run_whole, state)
