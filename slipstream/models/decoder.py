"""The decoder that Llama and its relatives share. An architecture's own file says only what differs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from slipstream.attention.backend import AttentionContext
from slipstream.config import ModelConfig
from slipstream.kernels.linear import linear
from slipstream.models.layers import Attention, Embedding, FeedForward, Linear, RMSNorm
from slipstream.models.rope import cos_sin_table


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, context: AttentionContext, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer's contribution and the residual stream it is still to be added to."""
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, context, cos_sin)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class Trunk(nn.Module):
    """Everything below the head; named ``model`` in checkpoints."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, idx) for idx in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model. Build it under the device and type it is to live in; weights come from ``load``."""

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, {"lm_head": config.vocab_size})
        self.cos_sin = cos_sin_table(config.rope, max_position, self.model.norm.weight.device)

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        hidden: Tensor = self.model.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer in self.model.layers:
            hidden, residual = layer(hidden, residual, context, self.cos_sin)
        assert residual is not None
        return self.model.norm.add(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return linear(hidden, head, None)

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor a checkpoint must bring, by its name there."""
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                yield from module.slots(name.rpartition(".")[0] + "." if "." in name else "")
            elif isinstance(module, RMSNorm | Embedding):
                yield f"{name}.weight", module.weight
