"""Launching a step: stage changes, prepare inputs, run the model, sample, commit, send the results. Never waits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention.backend import AttentionBackend, AttentionContext
from slipstream.attention.kv_cache import allocate_kv_caches
from slipstream.config import EngineConfig
from slipstream.device.interface import Device
from slipstream.kernels.commit import commit
from slipstream.runner.async_output import InFlightStep, OutputRing, PromptSpan, StepOutput
from slipstream.runner.input_batch import InputBatch, InputBuffers
from slipstream.runner.request_state import RequestRows
from slipstream.sampling.logprobs import pack_logprobs
from slipstream.sampling.sampler import SamplingNeeds, sample
from slipstream.types import StepPlan

# Prompt positions whose logits, a row of the vocabulary each, are in memory at the same time.
_SCORED_AT_ONCE = 128


class Model(Protocol):
    """What the runner asks of a model."""

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states after the final norm: [num_tokens, hidden]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        ...


class Runner:
    def __init__(self, config: EngineConfig, device: Device, model: Model, backend: AttentionBackend) -> None:
        self._config = config
        self._device = device
        self._model = model
        self._backend = backend
        max_reqs, depth = config.scheduler.max_num_seqs, config.steps_in_flight + 1
        self.rows = RequestRows(config, device)
        self.buffers = InputBuffers(config, self.rows)
        self.kv_caches = allocate_kv_caches(
            config.model, config.cache, getattr(torch, config.dtype), device.torch_device
        )
        self._out = torch.zeros(max_reqs, 2, dtype=torch.int32, device=device.torch_device)
        self._outputs = OutputRing(device, max_reqs, config.scheduler.max_num_batched_tokens, depth)
        self._needs_of_row = [SamplingNeeds()] * self.rows.num_rows
        # How many tokens of a row are prompt whose log probabilities are wanted; 0 for most.
        self._scored_prompt_len = [0] * self.rows.num_rows

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlightStep:
        with self._device.use_stream(self._device.compute_stream):
            for init in plan.row_inits:
                self.rows.stage_init(init)
                request = init.request
                self._needs_of_row[init.row] = SamplingNeeds.of(request)
                scored = request.params.prompt_logprobs is not None
                self._scored_prompt_len[init.row] = len(request.prompt_token_ids) if scored else 0
            for diff in plan.page_diffs:
                self.rows.stage_pages(diff)
            if self._config.poison:
                self.buffers.poison()
            batch = self.buffers.build(plan, padded_reqs=len(plan.requests), padded_tokens=plan.num_tokens)
            return self._outputs.send(plan, self._run(plan, batch))

    def _needs(self, plan: StepPlan) -> SamplingNeeds:
        needs = SamplingNeeds()
        for kind in {self._needs_of_row[r.row] for r in plan.requests if r.samples}:
            needs |= kind
        return needs

    def _run(self, plan: StepPlan, batch: InputBatch) -> StepOutput:
        """The device's part of a step, from inputs to committed rows."""
        rows, common = self.rows, batch.attention
        context = AttentionContext(
            backend=self._backend,
            metadata=self._backend.build(common),
            kv_caches=self.kv_caches,
            positions=batch.positions,
            slot_mapping=common.slot_mapping,
        )
        hidden = self._model.forward(batch.input_ids, context)
        logits = self._model.compute_logits(hidden.index_select(0, batch.last_token_indices))
        sampled = sample(logits, rows.sampling, batch.batch_rows, self._needs(plan))
        spans, prompt_logprobs = self._score_prompts(plan, hidden)
        out = self._out[: batch.batch_rows.shape[0]]
        commit(
            sampled.token_ids,
            sampled.failed,
            batch.batch_rows,
            common.query_start_loc,
            rows.stop_ids,
            rows.max_total,
            rows.token_ids,
            rows.num_computed,
            rows.num_tokens,
            rows.status,
            out,
        )
        return StepOutput(out, sampled.logprobs, prompt_logprobs, spans)

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
                    logits = self._model.compute_logits(hidden[start + at : start + end])
                    packed.append(pack_logprobs(logits, targets[at:end]))
            start += scheduled.num_tokens
        return tuple(spans), torch.cat(packed) if packed else None
