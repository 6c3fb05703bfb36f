"""EAGLE, EAGLE-3 and MTP: a small head drafts from the target's own hidden states.

At slot p the head takes the token at p + 1 and the target's hidden state at p: after the final norm, or the residual
stream after some layers, tapped while the target runs. So its first pass processes the target's tokens, shifted by one,
in the target's shape, rejected drafts included; its keys after those are overwritten when the positions are computed
again. Drafts after the first have no hidden state of the target: the head's own replaces it.

A head may have several modules, one per draft, each with its own keys. Module m at slot p takes the token at p + 1 and
the output of module m - 1 at p - 1, so the first pass runs all of them, and their outputs are kept beside the keys for
the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from slipstream.attention.context import NORMED, AttentionContext, StepTokens
from slipstream.attention.groups import CacheGroups, CacheSizes, allocate
from slipstream.cache_spec import TokenStates
from slipstream.config import EngineConfig, ModelConfig
from slipstream.device.interface import Device
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.step.draft_states import keep_states
from slipstream.speculate.autoregressive import AutoRegressiveSpeculator
from slipstream.speculate.draft_graphs import FirstSize
from slipstream.speculate.draft_inputs import ShiftedPassInputs, find_slots_before, prepare_shifted_pass
from slipstream.speculate.draft_notes import DraftNotes, NotedStep
from slipstream.speculate.head_follower import HeadFollower
from slipstream.speculate.speculator import DraftBatch, GraphSetting, TargetAttention

_MAX_VIEWS = 256


class Head(Protocol):
    """The drafter's interface to a head; implementations are in ``models``."""

    config: ModelConfig  # of its own layers; the vocabulary is that of the drafts
    taps: tuple[int, ...]  # numbers of target layers before each tap; empty: after the final norm
    target_ids: Tensor | None  # [vocab] int32: the target's id of each token; None: the same

    def combine(self, features: Tensor) -> Tensor: ...

    def forward(self, module_idx: int, input_ids: Tensor, hidden: Tensor, context: AttentionContext) -> Tensor: ...

    @property
    def keeps_keys_alone(self) -> bool: ...  # whether keys of a token depend on that token alone

    def write_keys(self, input_ids: Tensor, hidden: Tensor, context: AttentionContext) -> None: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class EagleSpeculator(AutoRegressiveSpeculator):
    slots_before: ClassVar[int] = 1
    shares_states = True

    def __init__(self, config: EngineConfig, device: Device, head: Head, caches: CacheGroups, rows: RowState) -> None:
        super().__init__(config, device, caches, rows)
        self._head = head
        device_, limits, size = device.torch_device, config.scheduler, config.model.hidden_size
        layers = head.taps or (NORMED,)
        width = len(layers) * size
        self._features = torch.zeros(limits.max_num_batched_tokens, width, dtype=self._dtype, device=device_)
        self._parts = dict(zip(layers, torch.split(self._features, size, dim=1), strict=True))
        # By number of tokens: creating a view takes longer than most of its uses.
        self._views: dict[int, Mapping[int, Tensor]] = {}
        if head.target_ids is not None:
            columns = torch.arange(len(head.target_ids), dtype=torch.int32, device=device_)
            self.draft_columns = torch.full((config.model.vocab_size,), -1, dtype=torch.int32, device=device_)
            self.draft_columns.index_copy_(0, head.target_ids.long(), columns)
        # Modules beyond the draft length are not used.
        self._num_modules, self._size = config.num_draft_modules, head.config.hidden_size
        hidden_shape = (self._num_modules, limits.max_num_seqs, self._size)
        self._hidden = torch.zeros(hidden_shape, dtype=self._dtype, device=device_)
        # The outputs of all modules but the last for each token, under the pages of its keys.
        kept, sizes = TokenStates(self._size), CacheSizes.from_config(config)
        self._kept = [allocate(kept, sizes, device_)[0].flatten(0, 1) for _ in range(self._num_modules - 1)]
        is_recorded = CUDAGraphMode(config.cudagraph_mode).decode_mode() is CUDAGraphMode.FULL
        self.notes: DraftNotes | None = None
        if config.scheduler.needs.follows:
            self.follower = HeadFollower(self)
            if is_recorded and self._num_modules == 1 and head.keeps_keys_alone:
                self.notes = DraftNotes(limits.max_num_seqs, width, self._dtype, device_)
        self._slots_before = torch.zeros(limits.max_num_batched_tokens, dtype=torch.int64, device=device_)

    def _num_columns(self, config: EngineConfig) -> int:
        assert config.draft_model is not None
        return config.draft_model.vocab_size

    @property
    def _target_ids(self) -> Tensor | None:
        return self._head.target_ids

    def taps(self, num_tokens: int) -> Mapping[int, Tensor]:
        if num_tokens not in self._views:
            if len(self._views) == _MAX_VIEWS:
                self._views.clear()
            self._views[num_tokens] = {layer: part[:num_tokens] for layer, part in self._parts.items()}
        return self._views[num_tokens]

    def step_buffers(self) -> tuple[Tensor, ...]:
        return (*super().step_buffers(), self._features, self._hidden, self._slots_before)

    def first_size(self, batch: DraftBatch) -> FirstSize:
        return FirstSize(batch.step.attention.num_actual_tokens, batch.step.decode_len)

    def first_query_lens(self, lengths: Sequence[int]) -> Sequence[int]:
        return sorted({1, *(1 + length for length in lengths)})

    def static_batch(self, desc: BatchExecutionDescriptor, setting: GraphSetting) -> DraftBatch:
        return setting.static(desc)

    def first_ids(self, batch: DraftBatch) -> Tensor:
        self._find_gaps(batch)
        step, num_reqs, num_tokens = batch.step, batch.padded_reqs, batch.step.positions.shape[0]
        starts, table = step.all_query_start_loc[: num_reqs + 1], self._block_table[:num_reqs]
        inputs = ShiftedPassInputs(
            input_ids=self._input_ids[:num_tokens],
            last_indices=self._last_indices[:num_reqs],
            draft_positions=self._draft_positions[:num_reqs],
            block_table=table,
        )
        prepare_shifted_pass(self._rows, batch.rows, starts, step.positions, inputs)
        if self._num_modules > 1:
            seq_starts, slots = self._seq_starts[:num_reqs], self._slots_before[:num_tokens]
            find_slots_before(starts, step.positions, table, seq_starts, self._page_size, slots)
        return inputs.input_ids

    def first_context(self, batch: DraftBatch, target: TargetAttention | None = None) -> AttentionContext:
        step, starts = batch.step, self._seq_starts[: batch.step.attention.seq_lens.shape[0]]
        common = replace(step.attention, seq_starts=starts)
        tokens = StepTokens(step.positions, common.slot_mapping, common)
        shared = None if target is None else self.caches.adapt(target.caches, target.shared, starts)
        return self.caches.begin(tokens, shared=shared)

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        head, num_tokens = self._head, input_ids.shape[0]
        made = [head.forward(0, input_ids, head.combine(self._features[:num_tokens]), context)]
        for idx in range(1, self._num_modules):
            kept = self._kept[idx - 1]
            # Tokens without a slot (-1) use the last one, on the page that is never read.
            kept.index_copy_(0, context.slot_mapping.remainder(kept.shape[0]), made[-1])
            before = kept.index_select(0, self._slots_before[:num_tokens])
            made.append(head.forward(idx, input_ids, before, context))
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)

    def follow(self, batch: DraftBatch) -> None:
        input_ids, context = self.first_ids(batch), self.first_context(batch)
        if self._num_modules > 1:  # each takes the output of the one before
            self.forward(input_ids, context)
        else:
            hidden = self._head.combine(self._features[: input_ids.shape[0]])
            self._head.write_keys(input_ids, hidden, context)

    def replay_first_pass(self, batch: DraftBatch) -> bool:
        return self._graphs is not None and self._graphs.follow(batch)

    def note(self, batch: DraftBatch) -> None:
        assert self.notes is not None
        step, num_reqs = batch.step, batch.padded_reqs
        assert step.positions.shape[0] == num_reqs
        features = self._features[:num_reqs]
        self.notes.add(batch.rows, self._rows, NotedStep(step.positions, step.attention.slot_mapping, features))

    def follow_notes(self, padded_reqs: int, num_steps: int) -> None:
        assert self.notes is not None
        notes, n = self.notes, num_steps * padded_reqs
        context = self.caches.begin(StepTokens(notes.positions[:n], notes.slots[:n], None))
        self._head.write_keys(notes.input_ids[:n], self._head.combine(notes.features[:n]), context)

    def _next(
        self, idx: int, num_drafts: int, input_ids: Tensor, left: Tensor | None, context: AttentionContext
    ) -> Tensor:
        made = list((self._hidden[:, : input_ids.shape[0]] if left is None else left).unbind())
        before = [made[(idx - 1) % len(made)], *made[:-1]]  # the first continues from the module that drafted last
        # A module that is not used again in this step need not write its keys.
        first = idx if num_drafts <= len(made) else 0
        for i in range(first, min(len(made), num_drafts)):
            made[i] = self._head.forward(i, input_ids, before[i], context)
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)

    def _select(self, hidden: Tensor, indices: Tensor | None = None) -> Tensor:
        """By module: [modules, n, size]."""
        if indices is None:
            return hidden.view(-1, self._num_modules, self._size).transpose(0, 1)
        kept = self._hidden[:, : indices.shape[0]]
        keep_states(hidden, indices, kept)
        return kept

    def _logits(self, idx: int, hidden: Tensor) -> Tensor:
        return self._head.compute_logits(hidden[idx % self._num_modules])
