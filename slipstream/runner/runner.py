"""Launching a step: stage changes, run the device's part, send the results. Never waits."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.attention.groups import CacheGroups
from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.kernels.commit import NUM_HEADER_COLUMNS
from slipstream.runner.async_output import InFlightStep, OutputRing, PromptSpan, StepOutput
from slipstream.runner.input_batch import InputBuffers
from slipstream.runner.program import Model, StepProgram
from slipstream.runner.recent import Recent
from slipstream.runner.request_state import RequestRows
from slipstream.runner.step_graphs import Drafting, DraftSizes, OnCost, StepGraphs
from slipstream.sampling.logprobs import pack_logprobs
from slipstream.sampling.registry import refuse_unknown
from slipstream.sampling.sampler import NO_NEEDS, SamplingNeeds
from slipstream.speculate.speculator import MakeSpeculator, draft_nothing
from slipstream.speculate.verify import Verifier
from slipstream.types import Composition, Request, StepPlan

# Prompt positions whose logits, a row of the vocabulary each, are in memory at the same time.
_SCORED_AT_ONCE = 128


class _Wishes(NamedTuple):
    """What the requests of a composition want of a step beside their tokens, and where the step leaves those."""

    needs: SamplingNeeds
    drafting: Drafting | None
    scores_prompts: bool
    out: Tensor  # [num_reqs, NUM_HEADER_COLUMNS + k + 1] int32


class Runner:
    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        model: Model,
        caches: CacheGroups,
        make_speculator: MakeSpeculator = draft_nothing,
        on_cost: OnCost | None = None,  # hears what steps cost, by their size
    ) -> None:
        self._config = config
        self.device = device
        max_reqs, depth = config.scheduler.max_num_seqs, config.steps_in_flight + 1
        num_drafts = config.num_drafts
        self.rows = RequestRows(config, device)
        self.buffers = InputBuffers(config, self.rows)
        self.caches = caches
        width = NUM_HEADER_COLUMNS + 1 + num_drafts
        self._out = torch.zeros(max_reqs, width, dtype=torch.int32, device=device.torch_device)
        self._outputs = OutputRing(device, max_reqs, num_drafts, config.scheduler.max_num_batched_tokens, depth)
        self.speculator = make_speculator(self.rows.state)
        verifier = Verifier(config.speculative, max_reqs, self.rows.num_tokens, self.speculator.drawn_from)
        self.program = StepProgram(model, caches, self.rows, self.buffers, verifier, self.speculator, self._out)
        mode = CUDAGraphMode(config.cudagraph_mode)
        logits = torch.zeros(
            self.buffers.max_num_logits,
            config.model.vocab_size if mode is not CUDAGraphMode.NONE else 0,
            dtype=torch.promote_types(getattr(torch, config.dtype), torch.float32),
            device=device.torch_device,
        )
        speculative = config.speculative
        drafts = (
            DraftSizes((0,), 0)
            if speculative is None
            else DraftSizes(
                speculative.lengths,
                speculative.initial_length,
                foresees=speculative.foresees,
                num_made=speculative.num_made,
            )
        )
        sizes = (config.cudagraph_sizes, max_reqs)
        self.graphs = StepGraphs(device, self.program, mode, *sizes, drafts, logits, on_cost)
        self.graphs.capture()
        self._needs_of_row = [NO_NEEDS] * self.rows.num_rows
        self._known_needs = {NO_NEEDS: NO_NEEDS}  # one object for each kind, so that they compare by identity
        self._drafts_of_row = [0] * self.rows.num_rows  # how many are made for it at most
        # How many tokens of a row are prompt whose log probabilities are wanted; 0 for most.
        self._scored_prompt_len = [0] * self.rows.num_rows
        self._wishes: Recent[Composition, _Wishes] = Recent()

    def check(self, request: Request) -> None:
        """Refuse a request that this engine cannot run as it is asked to; a RequestError says why."""
        refuse_unknown(request, self.rows.sampling.operations)

    def launch(self, plan: StepPlan) -> InFlightStep:
        # The loop is in this mode from its start; who calls from elsewhere need not know.
        if torch.is_inference_mode_enabled():
            return self._launch(plan)
        with torch.inference_mode():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> InFlightStep:
        device = self.device
        with device.sync_guard.forbid(), device.use_stream(device.compute_stream):
            for init in plan.row_inits:
                self.rows.stage_init(init)
                request = init.request
                needs = SamplingNeeds.of(request, self.rows.sampling.operations)
                self._needs_of_row[init.row] = self._known_needs.setdefault(needs, needs)
                self._drafts_of_row[init.row] = request.num_drafts(self._config.num_drafts)
                scored = request.params.prompt_logprobs is not None
                self._scored_prompt_len[init.row] = len(request.prompt_token_ids) if scored else 0
            if plan.page_diffs:
                self.rows.stage_pages(plan.page_diffs)
            if plan.host_drafts:
                self.rows.stage_host_drafts(plan.host_drafts)
            if self._config.poison:
                own = (self.caches.step_buffers(), self.speculator.step_buffers())
                for buffer in (*self.buffers.of_a_step(), self._out, *itertools.chain(*own)):
                    device.poison(buffer)
            return self._outputs.send(plan, self._run(plan))

    def _run(self, plan: StepPlan) -> StepOutput:
        batch, composition = self.buffers.stage(plan), plan.composition
        if plan.host_drafts:
            self.rows.place_host_drafts()
        wishes = self._wishes.get(composition) or self._wishes.put(composition, self._wishes_of(composition))
        hidden, logprobs = self.graphs.run(batch, wishes.needs, wishes.drafting)
        if logprobs is not None:
            logprobs = logprobs[: batch.logit_indices.shape[0]]
        if not wishes.scores_prompts:
            return StepOutput(wishes.out, logprobs, None)
        spans, prompt_logprobs = self._score_prompts(plan, hidden)
        return StepOutput(wishes.out, logprobs, prompt_logprobs, spans)

    def _wishes_of(self, composition: Composition) -> _Wishes:
        scores_prompts = any(self._scored_prompt_len[row] for row in composition.rows)
        out = self._out[: composition.num_reqs]
        return _Wishes(self._needs(composition), self._drafting(composition), scores_prompts, out)

    def _drafting(self, composition: Composition) -> Drafting | None:
        """How to draft after the step, if it has a request to draft for and the drafter wants to know of it.

        A request that draws nothing in this step may be drafted for: with one token of its prompt left.
        """
        makes = composition.num_next_drafts > 0
        if not makes and self.speculator.follower is None:
            return None
        rows = [row for row in composition.rows if self._drafts_of_row[row]]
        return Drafting(any(self._needs_of_row[row].noise for row in rows), makes) if rows else None

    def _needs(self, composition: Composition) -> SamplingNeeds:
        drawing = (row for row, samples in zip(composition.rows, composition.samples, strict=True) if samples)
        kinds = {id(kind): kind for kind in (self._needs_of_row[row] for row in drawing)}
        needs = NO_NEEDS
        for kind in kinds.values():
            needs |= kind
        return needs

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> tuple[tuple[PromptSpan, ...], Tensor | None]:
        """Log probabilities of prompt tokens, for requests that want them.

        While a prompt is computed the host's lengths are exact, so the ranges are host arithmetic. The state at
        position p scores the token at p + 1; the last prompt position belongs to the first output.
        """
        spans, packed, start = [], [], 0
        for i, scheduled in enumerate(plan.requests):
            first = scheduled.num_computed_bound
            count = min(first + scheduled.num_tokens, self._scored_prompt_len[scheduled.row] - 1) - first
            if count > 0:
                spans.append(PromptSpan(i, first + 1, count))
                targets = self.rows.token_ids[scheduled.row, first + 1 : first + 1 + count]
                for at in range(0, count, _SCORED_AT_ONCE):
                    end = min(at + _SCORED_AT_ONCE, count)
                    logits = self.program.model.compute_logits(hidden[start + at : start + end])
                    packed.append(pack_logprobs(logits, targets[at:end]))
            start += scheduled.num_tokens
        return tuple(spans), torch.cat(packed) if packed else None
