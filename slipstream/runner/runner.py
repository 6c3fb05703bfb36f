"""Launching a step: stage changes, prepare the batch, run it, queue the results. Never waits."""

from __future__ import annotations

import torch

from slipstream.attention.groups import CacheGroups
from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.models.model_state import StateSetting
from slipstream.plan import StepMasks, StepPlan
from slipstream.request import Request
from slipstream.runner.batch import BatchPreparer
from slipstream.runner.encoder_step import EncoderStep
from slipstream.runner.executor import StepExecutor
from slipstream.runner.graph_plan import GraphPlan
from slipstream.runner.held_step import HeldStep, ReleasedStep
from slipstream.runner.idle_work import IdleWork
from slipstream.runner.input_batch import InputBuffers
from slipstream.runner.micro_batches import Splitter
from slipstream.runner.pool_head import PoolHead
from slipstream.runner.program import HeadSetting, LaunchedStep, MakeHead, Model, StepProgram
from slipstream.runner.repeated_step import LaunchRecorder
from slipstream.runner.request_state import RequestRows
from slipstream.runner.step_graphs import GraphSizes, StepGraphs
from slipstream.runner.step_timing import OnCost, StepTimer
from slipstream.runner.token_masks import MaskSizes, MaskStore
from slipstream.sampling.registry import refuse_unknown
from slipstream.speculate.speculator import MakeSpeculator, draft_nothing


class Runner:
    """The device's side of the engine. A step passes through ``batches``, ``executor`` and the head."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        model: Model,
        caches: CacheGroups,
        make_speculator: MakeSpeculator = draft_nothing,
        on_cost: OnCost | None = None,  # receives the measured costs of steps
        make_head: MakeHead = PoolHead,
    ) -> None:
        self._config = config
        self.device = device
        self.caches = caches
        self.model_state = model.state
        own_columns = () if model.state is None else model.state.columns
        self.rows = RequestRows(config, device, [*make_head.columns, *own_columns])
        if model.state is not None:
            columns = {column.name: self.rows.columns[column.name] for column in own_columns}
            max_tokens = config.scheduler.max_num_batched_tokens
            model.state.open(StateSetting(columns, max_tokens, device.torch_device))
        self.buffers = InputBuffers(config, self.rows)
        self.speculator = make_speculator(self.rows.state, caches)
        max_num_logits = self.buffers.max_num_logits
        self.head = make_head(HeadSetting(config, device, model, self.rows, self.speculator, max_num_logits))
        least = config.split_steps_from
        self.splitter = None if least is None else Splitter(config.model.cache_specs, least)
        self.program = StepProgram(model, caches, self.buffers, self.head, config.model.vocab_size, self.splitter)
        self.encoder = None
        if model.source_encoder is not None:
            assert self.rows.encoder is not None
            encode = self.speculator.encode
            self.encoder = EncoderStep(config, device, model.source_encoder, caches, self.rows.encoder, encode)
        sizes = GraphSizes(config.cudagraph_sizes, config.scheduler.max_num_seqs)
        mode, plan = CUDAGraphMode(config.cudagraph_mode), GraphPlan.for_config(config.speculative)
        self.graphs = StepGraphs(device, self.program, mode, sizes, plan)
        # A model's own state, and where a step is cut, are decided on the host from step to step.
        may_repeat = device.repeats_launches and model.state is None and self.splitter is None
        self.batches = BatchPreparer(
            self.buffers, self.head, self.graphs, LaunchRecorder(device) if may_repeat else None
        )
        self.executor = StepExecutor(self.program, self.graphs)
        self.masks: MaskStore | None = None  # of an engine that takes constrained requests
        timer = None if on_cost is None else StepTimer(device, self.program, self.graphs, self.batches, on_cost)
        self.idle_work = IdleWork(device, self.program, self.graphs, self.batches, timer, sizes.max_num_reqs)
        self.idle_work.do_first()

    def open_masks(self, num_masks: int) -> None:
        """Get memory for this many masks of tokens: some requests will be constrained."""
        config, depth = self._config, self._config.steps_in_flight + 1
        num_reqs, num_logits = config.scheduler.max_num_seqs, self.buffers.max_num_logits
        sizes = MaskSizes(num_masks, config.model.vocab_size, num_logits, num_reqs, config.num_drafts)
        self.masks = MaskStore(self.device, sizes, depth)
        with self.device.sync_guard.allow("build"):
            self.device.timestamp()  # the first one aligns two clocks, and waits for that

    def check(self, request: Request) -> None:
        """Refuse a request that this engine cannot run; a RequestError says why."""
        state = self.model_state
        refuse_unknown(request, self.rows.sampling.operations, () if state is None else state.parameters)

    def cache_key(self, request: Request) -> bytes:
        """What its cached pages depend on beside the tokens."""
        own = b"" if self.model_state is None else self.model_state.cache_key(request)
        return own if request.encoder is None else request.encoder.digest() + own

    def launch(self, plan: StepPlan) -> LaunchedStep | HeldStep:
        # The engine loop is in inference mode already; other callers need not be.
        if torch.is_inference_mode_enabled():
            return self._launch(plan)
        with torch.inference_mode():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep | HeldStep:
        device = self.device
        with device.sync_guard.forbid(), device.use_stream(device.compute_stream):
            self._stage_changes(plan)
            if self._config.poison:
                for buffer in self.program.step_buffers():
                    device.poison(buffer)
            if self.model_state is not None:
                self.model_state.begin_step(plan)
            batch = self.batches.prepare(plan)
            if plan.encoder_runs:
                assert self.encoder is not None
                self.encoder.run(plan.encoder_runs)
            if plan.host_drafts:
                self.rows.place_host_drafts()
            if batch.work.needs_masks:
                target = self.executor.run_first_half(batch)
                return HeldStep(plan, batch, target, device.timestamp())
            hidden, found = self.executor.run(batch)
            return batch.work.send(plan, batch.inputs, hidden, found)

    def release(self, held: HeldStep, masks: StepMasks) -> ReleasedStep:
        """The second half of a step: launch what waited for the masks. No other step was launched in between."""
        with torch.inference_mode():
            return self._release(held, masks)

    def _release(self, held: HeldStep, masks: StepMasks) -> ReleasedStep:
        device, batch, target = self.device, held.batch, held.target
        assert self.masks is not None
        with device.sync_guard.forbid(), device.use_stream(device.compute_stream):
            resumed = device.timestamp()
            staged = self.masks.stage(masks, target.inputs.logit_indices.shape[0], batch.composition.num_reqs)
            found = batch.work.run(target, staged)
            self.masks.release()
            sent = batch.work.send(held.plan, batch.inputs, target.hidden, found)
        return ReleasedStep(held.plan, sent, held.paused, resumed)

    @property
    def newest_was_recorded(self) -> bool:
        """Whether the newest step was recorded while it ran, so that its duration is not that of such steps."""
        return self.batches.was_recorded

    def _stage_changes(self, plan: StepPlan) -> None:
        for init in plan.row_inits:
            self.rows.stage_init(init)
            self.head.move_in(init)
        if plan.page_diffs:
            self.rows.stage_pages(plan.page_diffs)
        if plan.host_drafts:
            self.rows.stage_host_drafts(plan.host_drafts)
