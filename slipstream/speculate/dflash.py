"""DFlash drafts a block in one pass: the newest token and masks, over a context of the target's hidden states.

The target's pass leaves the states of its tokens, and every layer of the head stores keys and values of them at the
tokens' own slots. Those of drafts that the target rejected lie after the row's tokens: the block overwrites them, or
its lengths end before them. The block's own keys and values are overwritten by the next step's context. So the host
never needs to know how many drafts were accepted.

A block always has all its masks, however many drafts the next step verifies: each sees the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.context import AttentionContext, StepTokens
from slipstream.attention.groups import CacheGroups
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import EngineConfig, ModelConfig
from slipstream.device.interface import Device
from slipstream.graphs.descriptor import BatchExecutionDescriptor
from slipstream.graphs.mode import CUDAGraphMode
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.step.prepare_inputs import TokenInputs
from slipstream.models.heads.network import BlockPlan
from slipstream.sampling.draw import DrawKeys, DrawnDrafts, draw_drafts
from slipstream.sampling.gumbel import TARGET_NOISE
from slipstream.speculate.block_inputs import BlockInputs, BlockShape, prepare_blocks
from slipstream.speculate.draft_gaps import mark_gaps
from slipstream.speculate.draft_graphs import DraftGraphs, FirstSize
from slipstream.speculate.draft_notes import DraftNotes, NotedStep
from slipstream.speculate.head_follower import HeadFollower
from slipstream.speculate.rejection import DRAFT_NOISE, DrawnFrom
from slipstream.speculate.speculator import DraftBatch, Follower, GraphSetting, TargetAttention


class BlockHead(Protocol):
    """The drafter's interface to a head; implementations are in ``models``."""

    config: ModelConfig  # of its own layers; the vocabulary is that of the drafts
    block: BlockPlan
    taps: tuple[int, ...]  # numbers of target layers before each tap
    target_ids: Tensor | None  # [vocab] int32: the target's id of each token; None: the same

    def write_context(self, features: Tensor, context: AttentionContext) -> Tensor: ...

    def forward(self, input_ids: Tensor, contexts: dict[bool, AttentionContext]) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class BlockBuffers:
    """Device memory of the passes over blocks, for all requests."""

    def __init__(self, max_reqs: int, shape: BlockShape, max_pages: int, device: torch.device) -> None:
        def ints(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        count, drafts = max_reqs * shape.length, max_reqs * shape.num_places
        self._length = shape.length
        self.tokens = TokenInputs(ints(count), ints(count, dtype=torch.int64), ints(count, dtype=torch.int64))
        self.query_lens, self.seq_lens, self.block_table = ints(max_reqs), ints(max_reqs), ints(max_reqs, max_pages)
        self.draft_rows, self.draft_positions, self.draft_ids = ints(drafts), ints(drafts), ints(drafts)
        self.starts = (torch.arange(max_reqs + 1, dtype=torch.int32) * shape.length).to(device)

    def inputs(self, num_reqs: int, num_drafts: int) -> BlockInputs:
        tokens = TokenInputs(*(buffer[: num_reqs * self._length] for buffer in self.tokens))
        lens = (self.query_lens[:num_reqs], self.seq_lens[:num_reqs], self.block_table[:num_reqs])
        drafts = num_reqs * num_drafts
        return BlockInputs(tokens, *lens, self.draft_rows[:drafts], self.draft_positions[:drafts])

    def all(self) -> tuple[Tensor, ...]:
        lens = (self.query_lens, self.seq_lens, self.block_table)
        return (*self.tokens, *lens, self.draft_rows, self.draft_positions, self.draft_ids)


@dataclass(slots=True)
class _Gaps:
    """Where each request's keys begin; see ``mark_gaps``."""

    seq_starts: Tensor
    first_slots: Tensor


class DFlashSpeculator:
    shares_states = True
    follower: Follower | None = None

    def __init__(
        self, config: EngineConfig, device: Device, head: BlockHead, caches: CacheGroups, rows: RowState
    ) -> None:
        speculative = config.speculative
        assert speculative is not None
        self.caches, self._head, self._rows = caches, head, rows
        self.num_drafts = speculative.num_drafts
        self._page_size, self._max_len = config.cache.page_size, config.scheduler.max_model_len
        on, limits, size = device.torch_device, config.scheduler, config.model.hidden_size
        dtype, width = getattr(torch, config.dtype), len(head.taps) * config.model.hidden_size
        length = self.num_drafts + (not head.block.samples_anchor)
        self.shape = BlockShape(length, self.num_drafts, head.block.mask_id)
        self._blocks = BlockBuffers(limits.max_num_seqs, self.shape, rows.page_table.shape[1], on)
        self._features = torch.zeros(limits.max_num_batched_tokens, width, dtype=dtype, device=on)
        self._parts = dict(zip(head.taps, torch.split(self._features, size, dim=1), strict=True))
        seq_starts, first_slots = torch.zeros(2, limits.max_num_seqs, dtype=torch.int32, device=on).unbind()
        self._gaps = _Gaps(seq_starts, first_slots)
        self._purpose = DRAFT_NOISE if speculative.verify == "rejection" else TARGET_NOISE
        self._drawn_from = self._keep_logits(config, on) if speculative.verify == "rejection" else None
        self._graphs: DraftGraphs | None = None
        self.notes: DraftNotes | None = None
        if limits.needs.follows:
            self.follower = HeadFollower(self)
            if CUDAGraphMode(config.cudagraph_mode).decode_mode() is CUDAGraphMode.FULL:
                self.notes = DraftNotes(limits.max_num_seqs, width, dtype, on)

    def _keep_logits(self, config: EngineConfig, on: torch.device) -> DrawnFrom:
        """Speculative sampling compares the two models' distributions, so the drafts' logits are kept, by row."""
        target_ids, num_rows = self._head.target_ids, self._rows.num_tokens.shape[0]
        columns = None
        if target_ids is not None:
            columns = torch.full((config.model.vocab_size,), -1, dtype=torch.int32, device=on)
            columns.index_copy_(0, target_ids.long(), torch.arange(len(target_ids), dtype=torch.int32, device=on))
        shape = (num_rows, self.num_drafts, self._head.config.vocab_size)
        return DrawnFrom(torch.zeros(shape, dtype=torch.float32, device=on), columns)

    @property
    def drawn_from(self) -> DrawnFrom | None:
        return self._drawn_from

    def encode(self, features: Tensor, page_ids: Tensor) -> None:
        """A head has no encoder of its own."""

    def taps(self, num_tokens: int) -> Mapping[int, Tensor]:
        return {layer: part[:num_tokens] for layer, part in self._parts.items()}

    def step_buffers(self) -> tuple[Tensor, ...]:
        return (*self._blocks.all(), self._features, self._gaps.seq_starts, self._gaps.first_slots)

    def init_graphs(self, setting: GraphSetting) -> Callable[[], bool]:
        self._graphs = DraftGraphs(self, setting)
        return self._graphs.capture_one_more

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        self.follow(batch)
        return self.finish(batch, noise)

    def run(self, batch: DraftBatch, noise: bool) -> Tensor:
        return self.propose(batch, noise) if self._graphs is None else self._graphs.run(batch, noise)

    # --- the context: a pass over the target's tokens ------------------------------------------------

    def first_size(self, batch: DraftBatch) -> FirstSize:
        return FirstSize(batch.step.attention.num_actual_tokens, batch.step.decode_len)

    def first_query_lens(self, lengths: Sequence[int]) -> Sequence[int]:
        return sorted({1, *(1 + length for length in lengths)})

    def rest_lengths(self, lengths: Sequence[int]) -> Sequence[int]:
        return [self.num_drafts]

    def static_batch(self, desc: BatchExecutionDescriptor, setting: GraphSetting) -> DraftBatch:
        return setting.static(desc)

    def first_ids(self, batch: DraftBatch) -> Tensor:
        """A step that was not processed leaves a gap; keys before it are not read."""
        # A pass in the target's shape has the target's padding, whatever the drafts' padding is.
        num_reqs = max(batch.padded_reqs, batch.step.attention.seq_lens.shape[0])
        goes_over_all, num_caught_up = True, 0
        starts, slots = self._gaps.seq_starts[:num_reqs], self._gaps.first_slots[:num_reqs]
        mark_gaps(batch.all_rows[:num_reqs], self._rows, goes_over_all, num_caught_up, starts, slots)
        return batch.step.positions

    def first_context(self, batch: DraftBatch, target: TargetAttention | None = None) -> AttentionContext:
        step = batch.step
        return self.caches.begin(StepTokens(step.positions, step.attention.slot_mapping, None))

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """Of the target's tokens only the states matter."""
        return self._head.write_context(self._features[: input_ids.shape[0]], context)

    def choose_first(self, batch: DraftBatch, hidden: Tensor, noise: bool) -> None:
        """No draft comes from the context alone."""

    def follow(self, batch: DraftBatch) -> None:
        self.forward(self.first_ids(batch), self.first_context(batch))

    def replay_first_pass(self, batch: DraftBatch) -> bool:
        return self._graphs is not None and self._graphs.follow(batch)

    def note(self, batch: DraftBatch) -> None:
        assert self.notes is not None
        step, num_reqs = batch.step, batch.padded_reqs
        noted = NotedStep(step.positions, step.attention.slot_mapping, self._features[:num_reqs])
        self.notes.add(batch.rows, self._rows, noted)

    def follow_notes(self, padded_reqs: int, num_steps: int) -> None:
        assert self.notes is not None
        notes, n = self.notes, num_steps * padded_reqs
        context = self.caches.begin(StepTokens(notes.positions[:n], notes.slots[:n], None))
        self._head.write_context(notes.features[:n], context)

    # --- the block ----------------------------------------------------------------------------------

    def finish(self, batch: DraftBatch, noise: bool) -> Tensor:
        """[padded_reqs, num_drafts]: one pass over all blocks, and the drafts of their places."""
        num_reqs, num_drafts, shape = batch.padded_reqs, batch.num_drafts, self.shape
        inputs = self._blocks.inputs(num_reqs, num_drafts)
        own = shape._replace(num_places=num_drafts)
        prepare_blocks(self._rows, batch.rows, own, self._page_size, inputs)
        hidden = self._head.forward(inputs.tokens.input_ids, self._contexts(batch, inputs))
        first = shape.length - shape.num_places  # the place of the first draft
        places = hidden.view(num_reqs, shape.length, -1)[:, first : first + num_drafts]
        logits = self._head.compute_logits(places.reshape(num_reqs * num_drafts, -1))
        drafts = self._blocks.draft_ids[: num_reqs * num_drafts]
        self._draw(batch, inputs, logits, drafts, noise)
        return drafts.view(num_reqs, num_drafts)

    def _contexts(self, batch: DraftBatch, inputs: BlockInputs) -> dict[bool, AttentionContext]:
        num_reqs, length = batch.padded_reqs, self.shape.length
        common = CommonAttentionMetadata(
            num_reqs=batch.num_reqs,
            num_actual_tokens=batch.num_reqs * length,
            max_query_len=length,
            query_start_loc=self._blocks.starts[: num_reqs + 1],
            query_start_loc_cpu=np.arange(batch.num_reqs + 1, dtype=np.int32) * length,
            query_lens=inputs.query_lens,
            seq_lens=inputs.seq_lens,
            # The bound counts the newest token, with which a block begins.
            seq_lens_cpu_upper_bound=np.minimum(batch.seq_lens_bound + length - 1, self._max_len),
            block_table=inputs.block_table,
            slot_mapping=inputs.tokens.slot_mapping,
            seq_starts=self._gaps.seq_starts[:num_reqs],
        )
        positions, slots = inputs.tokens.positions, inputs.tokens.slot_mapping
        return {
            is_causal: self.caches.begin(StepTokens(positions, slots, replace(common, is_causal=is_causal)))
            for is_causal in dict.fromkeys(self._head.block.is_causal)
        }

    def _draw(self, batch: DraftBatch, inputs: BlockInputs, logits: Tensor, drafts: Tensor, noise: bool) -> None:
        """Each draft at its request's temperature; other sampling parameters are applied by the target."""
        rows, target_ids = self._rows, self._head.target_ids
        if self._drawn_from is None:
            keys = DrawKeys(rows.temperature, rows.seeds, inputs.draft_positions, rows.choice)
            draw_drafts(logits, inputs.draft_rows, keys, noise, self._purpose, target_ids, DrawnDrafts(drafts, None))
            return
        num_reqs, num_drafts = batch.padded_reqs, batch.num_drafts
        by_draft, ids = logits.view(num_reqs, num_drafts, -1), drafts.view(num_reqs, num_drafts)
        positions = inputs.draft_positions.view(num_reqs, num_drafts).t().contiguous()
        for idx in range(num_drafts):
            keys = DrawKeys(rows.temperature, rows.seeds, positions[idx], rows.choice)
            drawn = DrawnDrafts(ids[:, idx], self._drawn_from.draft_logits[:, idx])
            draw_drafts(by_draft[:, idx], batch.rows, keys, noise, self._purpose, target_ids, drawn)
