"""The head that generates tokens: logits, verification of drafts, commit into the rows, the next drafts.

The drafter comes last in every step: it proposes, or processes a step without proposals (``Follower``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.graphs.descriptor import BatchExecutionDescriptor, Tier
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.kernels.step.commit import NUM_ACCEPTED_COLUMN, NUM_HEADER_COLUMNS, CheckedTokens, commit
from slipstream.plan import Composition, RowInit, StepPlan
from slipstream.runner.async_output import InFlightStep, OutputRing, StepOutput
from slipstream.runner.input_batch import InputBatch
from slipstream.runner.program import HeadSetting, TargetOutput
from slipstream.runner.prompt_logprobs import score_prompts
from slipstream.runner.requirements import Requirements, RowRequirements
from slipstream.runner.token_masks import StagedMasks
from slipstream.sampling.mask import TokenMasks
from slipstream.sampling.sampler import NO_NEEDS, NOISE_ALONE, SamplingNeeds
from slipstream.speculate.place_certain_drafts import place_certain_drafts
from slipstream.speculate.place_drafts import place_drafts
from slipstream.speculate.read_drafts import read_drafts
from slipstream.speculate.speculator import DraftBatch, GraphSetting
from slipstream.speculate.verify import Verifier


class GenerateHead:
    columns: ClassVar[tuple[Column, ...]] = ()

    def __init__(self, setting: HeadSetting) -> None:
        config, device, rows, speculator = setting.config, setting.device, setting.rows, setting.speculator
        max_reqs, num_drafts = config.scheduler.max_num_seqs, config.num_drafts
        self._model, self._rows = setting.model, rows
        self._goes_over_last = config.scheduler.needs.goes_over_last
        self.speculator = speculator
        self.follower = speculator.follower
        operations, shows_every_step = rows.sampling.operations, self.follower is not None
        self.requirements = RowRequirements(rows.num_rows, operations, num_drafts, shows_every_step)
        self.verifier = Verifier(config.speculative, max_reqs, rows.num_tokens, speculator.drawn_from)
        # A step's results for the host: [max_reqs, NUM_HEADER_COLUMNS + k + 1] int32.
        width = NUM_HEADER_COLUMNS + 1 + num_drafts
        self.out = torch.zeros(max_reqs, width, dtype=torch.int32, device=device.torch_device)
        depth, max_tokens = config.steps_in_flight + 1, config.scheduler.max_num_batched_tokens
        self.outputs = OutputRing(device, max_reqs, num_drafts, max_tokens, depth)
        # Of steps with constrained requests: the drafts that the next one verifies.
        self._next_drafts = torch.zeros(max_reqs, num_drafts, dtype=torch.int32, device=device.torch_device)
        # Logits of graphs of tier ``full``. They are large, so all graphs share the memory.
        has_graphs = CUDAGraphMode(config.cudagraph_mode) is not CUDAGraphMode.NONE
        # What a step brings in which no request draws.
        self._no_tokens = torch.zeros(max_reqs, 1, dtype=torch.int32, device=device.torch_device)
        self._none_failed = torch.zeros(max_reqs, dtype=torch.bool, device=device.torch_device)
        self._logits = torch.zeros(
            setting.max_num_logits,
            config.model.vocab_size if has_graphs else 0,
            dtype=torch.promote_types(getattr(torch, config.dtype), torch.float32),
            device=device.torch_device,
        )

    def move_in(self, init: RowInit) -> None:
        self.requirements.move_in(init)

    def work_for(self, composition: Composition) -> GenerateWork:
        return GenerateWork(self, self.requirements.of_composition(composition), out=self.out[: composition.num_reqs])

    # --- launches ---------------------------------------------------------------------------------

    def project(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        """Logits, [padded_logits, vocab]."""
        indices, is_decode = batch.logit_indices, batch.decode_len is not None
        # Where all decode, every token has its logits, in order.
        chosen = hidden if is_decode and len(indices) == len(hidden) else hidden.index_select(0, indices)
        return self._model.compute_logits(chosen)

    def recorded_logits(self, batch: InputBatch) -> Tensor:
        """The logits that a graph of tier ``full`` has computed."""
        return self._logits[: batch.logit_indices.shape[0]]

    def verify(
        self, batch: InputBatch, logits: Tensor, sampling: SamplingNeeds, masks: TokenMasks | None = None
    ) -> Tensor | None:
        """Check the drafts of every request and commit the outcome to the rows. Returns log probabilities."""
        verified = self.verifier.verify(logits, self._rows.sampling, batch.drafted, sampling, masks)
        self._commit(batch, verified.tokens)
        return verified.logprobs

    def commit_nothing(self, batch: InputBatch) -> None:
        """The end of a step in which no request may draw: rows move on by their tokens, and end with their prompts."""
        count = batch.batch_rows.shape[0]
        none = self._no_tokens[:count]
        self._commit(batch, CheckedTokens(none, none[:, 0], self._none_failed[:count]))

    def _commit(self, batch: InputBatch, checked: CheckedTokens) -> None:
        out = self.out[: batch.batch_rows.shape[0]]
        commit(checked, self._rows.state, batch.layout, batch.attention.query_lens, out)

    def draft(self, batch: DraftBatch, noise: bool, *, in_graph: bool) -> None:
        """Propose the next drafts and write them into the rows, after the tokens."""
        drafter = self.speculator
        draft_ids = drafter.propose(batch, noise) if in_graph else drafter.run(batch, noise)
        place_drafts(draft_ids, self._rows.batch_rows[: draft_ids.shape[0]], self._rows.state)

    def draft_certain(self, runs: Tensor) -> None:
        """Make the tokens that are certain to follow the step's the rows' drafts."""
        num_reqs = runs.shape[0]
        num_accepted, rows = self.out[:num_reqs, NUM_ACCEPTED_COLUMN], self._rows
        place_certain_drafts(runs, num_accepted, rows.batch_rows[:num_reqs], rows.state, self._goes_over_last)

    def read_drafts(self, num_reqs: int) -> Tensor | None:
        """The drafts of the step's requests, for the host: [num_reqs, k]. None if the engine does not draft."""
        out = self._next_drafts[:num_reqs]
        if not out.shape[1]:
            return None
        read_drafts(self._rows.state, self._rows.batch_rows[:num_reqs], out)
        return out

    def run_greedy(self, batch: InputBatch, hidden: Tensor) -> None:
        """Without noise, which on a CPU costs as much as a draft. Real steps correct the cost of those with noise."""
        self.verify(batch, self.project(batch, hidden), NO_NEEDS)
        if batch.drafting.num_drafts:
            self.draft(batch.drafting, noise=False, in_graph=True)
        elif self.follower is not None:
            self.follower.run(batch.drafting)

    # --- recordings -------------------------------------------------------------------------------

    def recorded_taps(self, graph: BatchExecutionDescriptor, num_tokens: int) -> Mapping[int, Tensor] | None:
        # A graph that ends with the logits serves steps with and without drafts.
        has_taps = graph.num_drafts > 0 or graph.tier == "full" or self.follower is not None
        return self.speculator.taps(num_tokens) if has_taps else None

    def record(self, batch: InputBatch, hidden: Tensor, graph: BatchExecutionDescriptor, *, warmup: bool) -> None:
        logits = self.project(batch, hidden)
        if graph.tier == "full":
            self.recorded_logits(batch).copy_(logits)
            # What follows is launched, but compiled by now: a change of the draft length may need it.
            for sampling in (NO_NEEDS, NOISE_ALONE) if warmup else ():
                self.verify(batch, logits, sampling)
            return
        self.verify(batch, logits, NOISE_ALONE)
        if graph.num_drafts:
            self.draft(batch.drafting, noise=True, in_graph=True)
        elif self.follower is not None:
            self.follower.record(batch.drafting, graph, warmup=warmup)

    def open_graphs(self, setting: GraphSetting) -> Callable[[], bool] | None:
        return self.speculator.init_graphs(setting)

    def settle(self) -> None:
        if self.follower is not None:
            self.follower.settle()

    def step_buffers(self) -> tuple[Tensor, ...]:
        return (self.out, *self.speculator.step_buffers())

    # --- results ----------------------------------------------------------------------------------

    def score_prompts(self, plan: StepPlan, hidden: Tensor, logprobs: Tensor | None, out: Tensor) -> StepOutput:
        scored_len, compute_logits = self.requirements.scored_prompt_len, self._model.compute_logits
        exact = self._rows.sampling.exact
        spans, packed = score_prompts(plan, hidden, self._rows.token_ids, scored_len, compute_logits, exact)
        return StepOutput(out, logprobs, packed, spans)


@dataclass(frozen=True, slots=True)
class GenerateWork:
    """The head's part in the steps of one composition."""

    head: GenerateHead
    requirements: Requirements
    out: Tensor  # [num_reqs, NUM_HEADER_COLUMNS + k + 1] int32, the head's own memory

    @property
    def tier(self) -> Tier:
        return self.requirements.tier

    @property
    def num_drafts(self) -> int:
        return self.requirements.num_drafts

    @property
    def needs_masks(self) -> bool:
        return self.requirements.is_constrained

    def begin(self, batch: InputBatch, graph: BatchExecutionDescriptor | None) -> None:
        if (follower := self.head.follower) is not None:
            proposes = graph is None or graph.num_drafts
            follower.begin_step(batch, None if proposes else graph)

    def taps(self, num_tokens: int) -> Mapping[int, Tensor] | None:
        return None if self.requirements.drafting is None else self.head.speculator.taps(num_tokens)

    def run(self, target: TargetOutput, staged: StagedMasks | None = None) -> Tensor | None:
        """Verify, commit, draft. Returns log probabilities if a request asked for them."""
        head, drafting, inputs = self.head, self.requirements.drafting, target.inputs
        is_projected = target.graph.mode is CUDAGraphMode.FULL
        logits = head.recorded_logits(inputs) if is_projected else head.project(inputs, target.hidden)
        masks = None if staged is None else staged.masks
        logprobs = head.verify(inputs, logits, self.requirements.sampling, masks)
        if drafting is not None:
            drafted = target.batch.drafting.after(target.graph)
            if drafting.proposes:
                head.draft(drafted, drafting.noise, in_graph=False)
            elif head.follower is not None:
                head.follower.run(drafted)
        if staged is not None and staged.runs is not None:
            head.draft_certain(staged.runs)
        return logprobs

    def send(self, plan: StepPlan, batch: InputBatch, hidden: Tensor, found: Tensor | None) -> InFlightStep:
        logprobs = None if found is None else found[: batch.logit_indices.shape[0]]
        if self.requirements.scores_prompts:
            output = self.head.score_prompts(plan, hidden, logprobs, self.out)
        else:
            output = StepOutput(self.out, logprobs, None)
        if self.needs_masks:
            output = output._replace(next_drafts=self.head.read_drafts(self.out.shape[0]))
        return self.head.outputs.send(plan, output)
