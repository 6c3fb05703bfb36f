"""A drafter that proposes a block in one pass, whose tokens see each other: a new token and marks for those to come.

Keys of the text are stored without attending. Then the block goes over them, and is overwritten by the next step. One
layer without rotation, random weights: what it says of a text is a few lines of torch (``BlockNet.propose``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.choice import open_caches
from slipstream.attention.context import StepTokens
from slipstream.attention.grouped_query import NewHeads
from slipstream.attention.groups import CacheGroups
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import DraftModel, EngineConfig, NetworkSize
from slipstream.device.interface import Device
from slipstream.device.operation import TensorSpec, operation
from slipstream.errors import ConfigError
from slipstream.kernels.request_rows import RowState
from slipstream.models.decoder import Decoder
from slipstream.models.registry import architecture_of
from slipstream.plan import RowStatus
from slipstream.speculate.draft_gaps import mark_gaps
from slipstream.speculate.method import Drafter, DraftMethod, TargetFiles
from slipstream.speculate.speculator import DraftBatch, MakeSpeculator, NoSpeculator
from slipstream.speculative_config import Needs, SpeculativeConfig
from tests.sim.tiny_engines import LIKELY
from tests.tiny_models import VOCAB_SIZE

HEADS, DIM, SIZE, MOST = 2, 8, 16, 5
LAYER = AttentionLayer(0, HEADS, 1, DIM, scale=DIM**-0.5)


class Block(DraftMethod):
    name = "toy_block"
    needs = Needs(
        default_drafts=3,
        max_drafts=MOST,
        own_keys=True,
        slots_per_draft=1,
        is_causal=False,
        is_certain=True,
    )

    def read_model(self, given: Any) -> None:
        if given is not None:
            raise ConfigError(f"{self.name} takes no model; leave out {given!r}")

    def open(self, config: SpeculativeConfig, target: TargetFiles) -> Drafter:
        model = architecture_of(target.hf_config).read_config(target.hf_config)
        shape = {"num_layers": 1, "num_heads": HEADS, "num_kv_heads": 1, "head_dim": DIM, "hidden_size": SIZE}
        return BlockDrafter(DraftModel(replace(model, **shape), NetworkSize()))  # type: ignore[arg-type]


@dataclass(frozen=True)
class BlockDrafter:
    model: DraftModel

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        net = BlockNet.draw(getattr(torch, config.dtype), device.torch_device)
        caches = open_caches(config, self.model.config, device, for_drafter=True)
        return lambda rows, _: BlockSpeculator(config, device, net, caches, rows)


class BlockNet(NamedTuple):
    embed: Tensor  # [vocab, size]
    marks: Tensor  # [MOST - 1, size]: instead of the tokens to draft
    qkv: Tensor  # [size, (heads + 2) * dim]
    out: Tensor  # [heads * dim, size]
    head: Tensor  # [size, len(LIKELY)]

    @classmethod
    def draw(cls, dtype: torch.dtype, on: torch.device) -> BlockNet:
        generator = torch.Generator().manual_seed(11)
        shapes = ((VOCAB_SIZE, SIZE), (MOST - 1, SIZE), (SIZE, (HEADS + 2) * DIM), (HEADS * DIM, SIZE))
        shapes = (*shapes, (SIZE, len(LIKELY)))
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return cls(*(tensor.to(dtype).to(on) for tensor in drawn))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values: [n, heads, dim] each."""
        q, k, v = (x @ self.qkv).split([HEADS * DIM, DIM, DIM], dim=1)
        return q.view(-1, HEADS, DIM), k.view(-1, 1, DIM), v.view(-1, 1, DIM)

    def propose(self, text: list[int], start: int, count: int, causal: bool = False) -> list[int]:
        """The definition, from the whole text; keys before ``start`` are missing."""
        block = torch.cat([self.embed[text[-1:]], self.marks[: count - 1]])
        _, keys, values = self.heads(torch.cat([self.embed[text[start:-1]], block]))
        q = self.heads(block)[0]
        scores = torch.einsum("qhd,kd->hqk", q, keys[:, 0]) * LAYER.scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).tril(len(keys) - count) == 0, -torch.inf)
        seen = torch.einsum("hqk,kd->qhd", scores.softmax(-1), values[:, 0]).reshape(count, -1)
        return [LIKELY[i] for i in ((block + seen @ self.out) @ self.head).argmax(1).tolist()]


class BlockSpeculator(NoSpeculator):
    def __init__(
        self, config: EngineConfig, device: Device, net: BlockNet, caches: CacheGroups, rows: RowState
    ) -> None:
        self.net, self._caches, self._rows = net, caches, rows
        self._page_size, self._max_len = config.cache.page_size, config.scheduler.max_model_len
        on, most = device.torch_device, config.scheduler.max_num_seqs
        self._words = torch.tensor(LIKELY, dtype=torch.int32).to(on)
        self._starts = {k: (torch.arange(most + 1, dtype=torch.int32) * k).to(on) for k in range(1, MOST + 1)}
        self._seq_starts = torch.zeros(most, dtype=torch.int32, device=on)
        self._first_slots = torch.zeros(most, dtype=torch.int32, device=on)
        turns = torch.stack([torch.ones(self._max_len, DIM // 2), torch.zeros(self._max_len, DIM // 2)], dim=1)
        self._cos_sin = turns.to(on)  # no rotation

    def propose(self, batch: DraftBatch, noise: bool) -> Tensor:
        self._store(batch)
        rows, net, k, n = self._rows, self.net, batch.num_drafts, batch.padded_reqs
        ids, positions, slots, query_lens, seq_lens, table = toy_block(batch.rows, rows, self._page_size, k)
        first = net.embed.index_select(0, ids).unsqueeze(1)
        x = torch.cat([first, net.marks[: k - 1].unsqueeze(0).expand(n, k - 1, SIZE)], dim=1).view(n * k, SIZE)
        starts_cpu = np.arange(batch.num_reqs + 1, dtype=np.int32) * k
        common = CommonAttentionMetadata(
            num_reqs=batch.num_reqs,
            num_actual_tokens=batch.num_reqs * k,
            max_query_len=k,
            query_start_loc=self._starts[k][: n + 1],
            query_start_loc_cpu=starts_cpu,
            query_lens=query_lens,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=np.minimum(batch.seq_lens_bound + k, self._max_len),
            block_table=table,
            slot_mapping=slots,
            seq_starts=self._seq_starts[:n],
            is_causal=False,
        )
        context = self._caches.begin(StepTokens(positions, slots, common))
        seen = context.run(LAYER, NewHeads(*net.heads(x), self._cos_sin)).reshape(n * k, HEADS * DIM)
        return toy_choose((x + seen @ net.out) @ net.head, self._words, query_lens, k)

    def step_buffers(self) -> tuple[Tensor, ...]:
        return self._seq_starts, self._first_slots

    def _store(self, batch: DraftBatch) -> None:
        """Keys of the tokens that the target has gone over; those of rejected drafts are overwritten.

        Steps without drafts leave a gap: what is before it is not read.
        """
        step, n = batch.step, batch.padded_reqs
        goes_over_all, num_caught_up = True, 0
        mark_gaps(batch.rows, self._rows, goes_over_all, num_caught_up, self._seq_starts[:n], self._first_slots[:n])
        ids = toy_known_ids(batch.rows, step.all_query_start_loc[: n + 1], step.positions, self._rows.token_ids)
        _, keys, values = self.net.heads(self.net.embed.index_select(0, ids))
        context = self._caches.begin(StepTokens(step.positions, step.attention.slot_mapping, None))
        context.at(LAYER).store(LAYER, keys, values, self._cos_sin, None)


# --- operations -------------------------------------------------------------------------------------


@operation(lambda positions: TensorSpec(tuple(positions.shape), torch.int32))
def toy_known_ids(rows: Tensor, starts: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    indices = torch.arange(positions.shape[0], dtype=torch.int32)
    request = torch.searchsorted(starts[1:], indices, right=True).clamp(max=len(rows) - 1)
    return token_ids[rows.long()[request], positions]


def _block_shape(batch_rows: Tensor, rows: RowState, count: int) -> tuple[TensorSpec, ...]:
    n = batch_rows.shape[0]
    wide, each = TensorSpec((n * count,), torch.int64), TensorSpec((n,), torch.int32)
    return each, wide, wide, each, each, TensorSpec((n, rows.page_table.shape[1]), torch.int32)


@operation(_block_shape)
def toy_block(
    batch_rows: Tensor,  # [n] int32
    rows: RowState,
    page_size: int,
    count: int,
) -> tuple[Tensor, ...]:  # last tokens; positions and slots of the blocks; query_lens, seq_lens, block_table
    own, idx = batch_rows.long(), torch.arange(count)
    length = rows.num_tokens[own]
    runs = (rows.status[own] == RowStatus.RUNNING) & (rows.num_computed[own] + 1 == length) & (rows.max_drafts[own] > 0)
    query_lens = torch.where(runs, (rows.max_total[own] - length + 1).clamp(max=count), 0)
    position = length.unsqueeze(1) - 1 + idx
    exists = idx < query_lens.unsqueeze(1)
    position = torch.where(exists, position, 0).long()
    slots = rows.page_table[own.unsqueeze(1), position // page_size].long() * page_size + position % page_size
    last = torch.where(runs, rows.token_ids[own, (length - 1).clamp(min=0).long()], 0)
    seq_lens = torch.where(runs, length - 1 + query_lens, 0)
    lens = (query_lens.int(), seq_lens.int(), rows.page_table[own])
    return last, position.flatten(), torch.where(exists, slots, -1).flatten(), *lens


@operation(lambda query_lens, count: TensorSpec((query_lens.shape[0], count), torch.int32))
def toy_choose(logits: Tensor, words: Tensor, query_lens: Tensor, count: int) -> Tensor:
    drafts = words[logits.argmax(1)].view(-1, count)
    return torch.where(torch.arange(count) < query_lens.unsqueeze(1), drafts, -1)
