"""Heads that draft token by token: each pass takes a token and a hidden state, and gives the next state.

The networks are in ``eagle``, ``eagle3`` and ``mtp``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.kernels.elementwise.scaled_embedding import scaled_embedding
from slipstream.kernels.step.draft_states import join_states
from slipstream.models.decoder import Decoder
from slipstream.models.fused_layer import FusedLayers, prepare_attention
from slipstream.models.heads.network import HeadNetwork, HeadPlan
from slipstream.models.layers import Attention, KeyWriter, RMSNorm


class DraftHead(HeadNetwork, ABC):
    """One pass drafts one token for each sequence."""

    def __init__(self, plan: HeadPlan, target: Decoder, embedding_scale: float = 1.0) -> None:
        super().__init__(plan, target)
        self.num_modules = plan.config.num_layers if plan.kind == "mtp" else 1
        self.embedding_scale = embedding_scale
        self.fused: list[FusedLayers | None] = []  # by module, where it makes a pass of few tokens faster

    def combine(self, features: Tensor) -> Tensor:
        """[n, max(1, taps) * target_hidden_size] from the target -> [n, hidden], the input state of the first pass."""
        return features

    @abstractmethod
    def forward(
        self,
        module_idx: int,  # one of several where there are any
        input_ids: Tensor,  # [n] int32, ids of the target: the tokens at p + 1
        hidden: Tensor,  # [n, hidden], the states at p
        context: AttentionContext,
    ) -> Tensor:  # [n, hidden], the input state of the next pass
        """One pass at the context's positions p."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, draft_vocab], in float32 at least, from the output of ``forward``."""
        return self.project_logits(hidden)

    @property
    def keeps_keys_alone(self) -> bool:
        """Whether the first module's keys and values depend on one token each, not on the module's earlier layers."""
        return self.only_attention() is not None

    def write_keys(self, input_ids: Tensor, hidden: Tensor, context: AttentionContext) -> None:
        """Write the first module's keys and values to its cache, and compute nothing else."""
        attention, cos_sin = self.only_attention(), self.cos_sin[0]
        if attention is None:  # the next layer's keys need this layer's full output
            self.forward(0, input_ids, hidden, context)
            return
        if few := self.fused_for(0, hidden) is not None:
            assert isinstance(attention, Attention), "only such layers are fused"
            prepare_attention(context, [attention], [cos_sin], hidden.dtype)
        attention.store(self.attended(input_ids, hidden, context, few), context, cos_sin, few)

    @abstractmethod
    def only_attention(self) -> KeyWriter | None:
        """The attention of the first module, if it has one layer."""

    @abstractmethod
    def attended(self, input_ids: Tensor, hidden: Tensor, context: AttentionContext, few: bool) -> Tensor:
        """The input of that attention's projection. ``few`` tokens have kernels of their own."""

    def join(
        self, input_ids: Tensor, hidden: Tensor, norms: tuple[RMSNorm, RMSNorm] | None, positions: Tensor | None = None
    ) -> Tensor:
        """[n, 2 * hidden]: the tokens' embeddings and the states concatenated, each normed where there are norms.

        With ``positions`` the embedding at position 0 is zeroed.
        """
        embedding = self.borrowed.embedding if self.embed_tokens is None else self.embed_tokens
        gains = (None, None) if norms is None else (norms[0].weight, norms[1].weight)
        table = embedding.dense
        if table is None or self.embedding_scale != 1.0:
            if table is None:
                table = embedding.matrix.look_up(input_ids)
                table = table if self.embedding_scale == 1.0 else table * self.embedding_scale
            else:
                table = scaled_embedding(table, input_ids, self.embedding_scale)
            return join_states(hidden, table, None, gains[0], gains[1], self.config.rms_norm_eps, positions)
        return join_states(hidden, table, input_ids, gains[0], gains[1], self.config.rms_norm_eps, positions)

    def fused_for(self, module_idx: int, x: Tensor) -> FusedLayers | None:
        """The module's fused layers, where they are faster for this number of tokens."""
        fused = self.fused[module_idx] if self.fused else None
        return fused if fused is not None and x.shape[0] <= fused.max_tokens else None
