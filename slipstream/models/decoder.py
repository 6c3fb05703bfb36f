"""The decoder that Llama and its relatives share. An architecture's own file says only what differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from slipstream.attention.context import NORMED, AttentionContext
from slipstream.attention.grouped_query import GroupedQueryStep
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.kernels.native.decoder_stack import DecoderStack, LayerTap, StackInput, decoder_stack
from slipstream.kernels.triton_jit import runs_triton
from slipstream.models.cpu_stack import stack_of
from slipstream.models.experts import Experts, split_experts
from slipstream.models.fused_layer import FusedLayers, fuse
from slipstream.models.layers import (
    Attention,
    Embedding,
    FeedForward,
    Layer,
    Linear,
    RMSNorm,
    checkpoint_slots,
    finish_weights,
    open_weights,
)
from slipstream.models.model_state import ModelState
from slipstream.models.pooled_head import Classifier, PooledHead
from slipstream.models.rope import layer_tables
from slipstream.models.source_encoder import SourceEncoder
from slipstream.weights.matrix import Matrix, Slot
from slipstream.weights.registry import scheme_of

# Checkpoints may carry these; the engine computes them itself.
COMPUTED_TENSORS = ("rotary_emb.inv_freq", "rope_freqs.weight")
_ANY_NUMBER = 1 << 30  # of tokens
_LAYER = re.compile(r"(?:model\.)?layers\.([0-9]{1,9})\.")


class DecoderLayer(Layer):
    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.make_mixer(config, idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Experts(config) if config.has_experts(idx) else FeedForward(config)

    @classmethod
    def make_mixer(cls, config: ModelConfig, idx: int) -> nn.Module:
        """The token mixer. An architecture with layers of other kinds overrides this."""
        return Attention(config, idx)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, context: AttentionContext, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer's output, and the residual stream that it is not yet added to."""
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, context, cos_sin)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class Trunk(nn.Module):
    """Everything below the head; named ``model`` in checkpoints."""

    def __init__(self, config: ModelConfig, layer_class: type[DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.layers = nn.ModuleList(layer_class(config, idx) for idx in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model. Build it under its device and type; ``load`` fills in the weights."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    source: ClassVar[str] = "the checkpoint"
    hints: ClassVar[Mapping[str, str]] = {}
    layer_pattern: ClassVar[re.Pattern[str]] = re.compile(r"model\.layers\.([0-9]{1,9})\.")
    classifier: ClassVar[Classifier | None] = Classifier((("score", ""),), "last")
    state: ModelState | None = None
    pooled_head: PooledHead | None = None  # dense layers after pooling, where the checkpoint has some

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, self.layer_class)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, {"lm_head": config.vocab_size})
        self._output: Matrix | None = None  # a tied embedding in a layout for products
        self.stack: DecoderStack | None = None  # all layers as one operation, where possible
        self._fused: FusedLayers | None = None  # the same layers for steps of few tokens
        self.cos_sin = layer_tables(config, max_position, self.device)
        open_weights(self, scheme_of(config.quantization))

    @property
    def source_encoder(self) -> SourceEncoder | None:
        """What reads an encoder-decoder's other input."""
        return None

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        embed = self.model.embed_tokens
        if self._fused is not None and input_ids.shape[0] <= self._fused.max_tokens:
            normed: Tensor = self.model.norm(self._fused.forward(embed, input_ids, context, self.cos_sin))
            context.tap(NORMED, normed)
            return normed
        return self.forward_first(input_ids, context, self.config.num_layers)

    def forward_first(self, input_ids: Tensor, context: AttentionContext, num_layers: int) -> Tensor:
        """The network cut to its first layers, which may draft for the whole."""
        hidden: Tensor = self.model.embed_tokens(input_ids)
        if self.stack is not None:
            step = cast(GroupedQueryStep, context.group_steps[0])  # all layers of a stack have the same cache
            if (common := step.in_place()) is not None:
                return self._forward_at_once(self.stack, hidden, context, (step, common), num_layers)
        residual: Tensor | None = None
        layers = zip(self.model.layers[:num_layers], self.cos_sin[:num_layers], strict=True)
        for idx, (layer, cos_sin) in enumerate(layers):
            context.tap(idx, hidden, residual)
            hidden, residual = layer(hidden, residual, context, cos_sin)
        assert residual is not None
        return self._finish(hidden, residual, context)

    def _finish(self, hidden: Tensor, residual: Tensor, context: AttentionContext) -> Tensor:
        context.tap(self.config.num_layers, hidden, residual)
        normed = self.model.norm.add(hidden, residual)[0]
        context.tap(NORMED, normed)
        return normed

    def _forward_at_once(
        self,
        stack: DecoderStack,
        hidden: Tensor,
        context: AttentionContext,
        keys: tuple[GroupedQueryStep, CommonAttentionMetadata],
        num_layers: int,
    ) -> Tensor:
        step, common = keys
        places = step.places.of(self.cos_sin[0], hidden.dtype)
        arrays = (step.caches.in_order, places, common.requests)
        taps = [LayerTap(idx, out) for idx, out in context.taps.items() if 0 <= idx < num_layers]
        hidden, residual = decoder_stack(StackInput(hidden, None), stack, *arrays, taps, num_layers)
        return self._finish(hidden, residual, context)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.output.project_wide(hidden)

    @property
    def output(self) -> Matrix:
        """The matrix that computes logits from the last hidden state."""
        if self.lm_head is not None:
            return self.lm_head.matrix
        return self.model.embed_tokens.matrix if self._output is None else self._output

    def output_rows(self, token_ids: Tensor) -> Tensor | None:
        """Rows of the matrix that computes logits, once weights are loaded; None before if they cannot be read yet."""
        holder = self.model.embed_tokens if self.lm_head is None else self.lm_head
        matrix = holder.stored if holder.stored is not None else holder.matrix
        return matrix.look_up(token_ids) if isinstance(matrix, Matrix) else None

    def finish_weights(self, device: torch.device | None = None) -> None:
        """After loading: convert every weight to the layout that multiplies fastest on its device.

        Another device is given where a network without memory is only measured.
        """
        device = device or self.device
        finish_weights(self, device)
        if self.lm_head is None:
            self._output = self.model.embed_tokens.matrix.for_products(device)
        if self.layer_class is DecoderLayer and self.config.is_plain:
            self.stack = stack_of(self.config, self.model.layers)
            self._fused = fuse(self.model.layers)

    def keep_exact(self) -> None:
        """Once the weights are finished: what is computed for a token depends on its text alone, to the bit."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.keep_exact(self.device)
        if self._output is not None:
            self._output = self._output.exact(self.device)
            assert self._output is not None, "resolve refuses such weights"
        if self.stack is None and not runs_triton(self.model.norm.weight) and self.device.type == "cpu":
            # torch computes what is left over after vectors in another way, and where that is depends on the batch.
            raise ConfigError(
                f"exact is not possible: on a CPU the layers of {self.config.architecture} are not computed by C "
                "kernels as a whole"
            )
        if self.stack is not None:
            self.stack.alone = True
        elif self.layer_class is DecoderLayer and self.config.is_plain:
            self._fused = fuse(self.model.layers, max_tokens=_ANY_NUMBER)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Every tensor a checkpoint must bring, by its name there."""
        return checkpoint_slots(self)

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The network's tensors that a checkpoint's tensor holds, by the names of ``slots``.

        An architecture whose checkpoints name, join or shift tensors differently undoes that here.
        """
        if self.config.experts is not None and ".experts." in name:
            return split_experts(name, tensor, self.config.experts)
        return [(name, tensor)]

    def optional(self) -> Mapping[str, Tensor]:
        return {}

    def adopt(self, name: str, file_name: str, tensor: Tensor) -> None:
        raise AssertionError(f"no tensor is optional, {name} included")

    def ignores(self, name: str) -> bool:
        if name == "lm_head.weight":
            return self.lm_head is None
        # MTP layers are a drafter, which loads them itself.
        return name.endswith(COMPUTED_TENSORS) or is_mtp_tensor(name, self.config.num_layers)

    def finish_loading(self) -> None:
        pass


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Whether a tensor of a checkpoint belongs to MTP layers, which follow the target's own ``num_layers``."""
    match = _LAYER.match(name)
    return name.startswith("mtp.") or (match is not None and int(match[1]) >= num_layers)
