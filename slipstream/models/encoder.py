"""Encoders: models whose tokens attend to all of their text, for vectors, scores and classes of texts.

The layers of BERT and its relatives: the norm comes after the residual sum. An architecture's own file says what its
tensors are called and which embeddings it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from slipstream.attention.context import NORMED, AttentionContext
from slipstream.attention.encoder import EncoderHeads, EncoderLayer, EncoderSpec
from slipstream.checkpoints.hf_config import read_architecture_name, require
from slipstream.columns import Column
from slipstream.config import DTYPE_BYTES, ModelConfig, RopeConfig
from slipstream.encoder_config import EncoderConfig
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.kernels.elementwise.gelu import gelu
from slipstream.kernels.elementwise.layer_norm import layer_norm
from slipstream.kernels.step.token_types import TypedRequests, token_types
from slipstream.models.layers import Embedding, Layer, Linear, checkpoint_slots, finish_weights, open_weights
from slipstream.models.model_state import ModelState, StateSetting, StepRequests
from slipstream.models.pooled_head import Classifier, PooledHead
from slipstream.models.source_encoder import SourceEncoder
from slipstream.parameters import Parameter
from slipstream.plan import StepPlan
from slipstream.request import Request
from slipstream.values import describe_value
from slipstream.weights.matrix import Slot
from slipstream.weights.registry import scheme_of

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}


def read_encoder_config(hf: dict[str, Any], encoder: EncoderConfig) -> ModelConfig:
    """The shape of an encoder in the words of BERT's config."""
    fields = Fields.from_dict(hf)
    hidden_act = fields.text("hidden_act", "gelu")
    if hidden_act not in _ACTIVATIONS:
        raise ModelError(
            f"activation {describe_value(hidden_act)} in {fields.source} is not supported for encoders; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    if (kind := fields.text("position_embedding_type", "absolute")) != "absolute":
        raise ModelError(f"position_embedding_type {describe_value(kind)} in {fields.source} is not supported")
    if fields.flag("is_decoder"):
        raise ModelError(f"{fields.source} says is_decoder; such a model is only supported as an encoder")
    hidden_size, num_heads = require(fields, "hidden_size"), require(fields, "num_attention_heads")
    if hidden_size % num_heads:
        raise ModelError(f"{fields.source} has {num_heads} heads for a hidden size of {hidden_size}")
    num_layers = require(fields, "num_hidden_layers")
    dtype = fields.text("torch_dtype" if fields.has("torch_dtype") else "dtype", "float32")
    return ModelConfig(
        architecture=read_architecture_name(fields),
        vocab_size=require(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=require(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        rms_norm_eps=fields.number("layer_norm_eps", 1e-12, low=0.0, high=1.0),
        max_position=require(fields, "max_position_embeddings") - encoder.first_position,
        rope=RopeConfig(rotary_dim=0),
        activation=_ACTIVATIONS[hidden_act],  # type: ignore[arg-type]
        layer_caches=(EncoderSpec(),) * num_layers,
        encoder=encoder,
        dtype=dtype if dtype in DTYPE_BYTES else "float32",
    )


class LayerNorm(Layer):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return layer_norm(x, residual, self.weight, self.bias, self.eps)

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", self.weight
        yield f"{name}.bias", self.bias


class SelfAttention(Layer):
    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer = EncoderLayer(idx, config.head_dim**-0.5)
        self.num_heads = config.num_heads
        self.qkv = Linear(size, {"query": size, "key": size, "value": size}, bias=True)
        self.output = Linear(size, {"output": size}, bias=True)
        self.norm = LayerNorm(size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: AttentionContext, bias: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 3 * self.num_heads, -1).split(self.num_heads, dim=1)
        mixed = context.run(self.layer, EncoderHeads(q, k, v, bias))
        normed: Tensor = self.norm(self.output(mixed.flatten(1)), x)
        return normed


class EncoderFeedForward(Layer):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.up = Linear(config.hidden_size, {"up": size}, bias=True)
        self.down = Linear(size, {"down": config.hidden_size}, bias=True)
        self.norm = LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.tanh = config.activation == "gelu_tanh"

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.down(gelu(self.up(x), self.tanh)), x)
        return normed


class Block(Layer):
    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        self.attention = SelfAttention(config, idx)
        self.mlp = EncoderFeedForward(config)

    def forward(self, x: Tensor, context: AttentionContext, bias: Tensor | None) -> Tensor:
        hidden: Tensor = self.mlp(self.attention(x, context, bias))
        return hidden


class TokenTypes:
    """The model's state where it tells the second text of a pair from the first."""

    columns: Sequence[Column] = (Column("second_from", lambda request: request.second_from),)
    parameters: Sequence[Parameter] = ()

    def open(self, setting: StateSetting) -> None:
        self._second_from = setting.columns["second_from"]
        self._of_tokens = torch.zeros(setting.max_tokens, dtype=torch.int32, device=setting.device)

    def cache_key(self, request: Request) -> bytes:
        return b""  # nothing is cached

    def begin_step(self, plan: StepPlan) -> None:
        pass

    def prepare(self, requests: StepRequests) -> Tensor:
        out = self._of_tokens[: requests.positions.shape[0]]
        own = TypedRequests(requests.positions, requests.batch_rows, requests.query_start_loc, requests.query_lens)
        token_types(own, self._second_from, out)
        return out

    def step_buffers(self) -> tuple[Tensor, ...]:
        return (self._of_tokens,)


class Encoder(nn.Module):
    """Build it under its device and type; ``load`` fills in the weights.

    Slots have names of our own, the same for all architectures: ``renamed`` gives them to a checkpoint's tensors.
    """

    layer_pattern: ClassVar[re.Pattern[str]] = re.compile(r"(?:\w+\.)?encoder\.layer\.([0-9]{1,9})\.")
    source: ClassVar[str] = "the checkpoint"
    hints: ClassVar[Mapping[str, str]] = {}
    # The names of a checkpoint's tensors, as patterns, and what they are called here.
    renamed: ClassVar[Mapping[str, str]] = {}
    classifier: ClassVar[Classifier | None] = None
    state: ModelState | None = None
    pooled_head: PooledHead | None = None
    source_encoder: SourceEncoder | None = None

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        assert config.encoder is not None
        self.config, shape, size = config, config.encoder, config.hidden_size
        self.words = Embedding(config.vocab_size, size)
        self.places = Embedding(config.max_position + shape.first_position, size)
        self.types = Embedding(shape.num_token_types, size) if shape.num_token_types else None
        self.norm = LayerNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Block(config, idx) for idx in range(config.num_layers))
        self.distances = Distances(config, max_position) if shape.relative_buckets else None
        if shape.num_token_types > 1:
            self.state = TokenTypes()
        open_weights(self, scheme_of(config.quantization))

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        assert self.config.encoder is not None
        hidden: Tensor = self.words(input_ids) + self.places(context.positions + self.config.encoder.first_position)
        if self.types is not None:
            hidden += self.types(context.inputs) if self.state is not None else self.types.weight[0]
        hidden = self.norm(hidden)
        bias = None if self.distances is None else self.distances.bias
        for idx, layer in enumerate(self.layers):
            context.tap(idx, hidden)
            hidden = layer(hidden, context, bias)
        context.tap(self.config.num_layers, hidden)
        context.tap(NORMED, hidden)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("an encoder has no logits")

    def finish_weights(self, device: torch.device | None = None) -> None:
        finish_weights(self, device or self.device)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        return checkpoint_slots(self)

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        assert self.config.encoder is not None
        name = name.removeprefix(self.config.encoder.prefix)
        # As the first checkpoints of BERT have it.
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        for pattern, own in self.renamed.items():
            if match := re.fullmatch(pattern, name):
                return [(match.expand(own), tensor)]
        return [(name, tensor)]

    def optional(self) -> Mapping[str, Tensor]:
        return {}

    def adopt(self, name: str, file_name: str, tensor: Tensor) -> None:
        raise AssertionError(f"no tensor is optional, {name} included")

    def ignores(self, name: str) -> bool:
        """What predicts words or sentences, and poolers, which a classifier reads from the checkpoint by itself."""
        return name.startswith(("cls.", "lm_head.", "pooler.", "classifier.")) or name.endswith("position_ids")

    def finish_loading(self) -> None:
        if self.distances is not None:
            self.distances.spread()


class Distances(Layer):
    """A bias on scores for each head, by the distance of the key from the query: farther ones share a bucket."""

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        assert config.encoder is not None
        shape = config.encoder
        self.table = nn.Parameter(torch.empty(shape.relative_buckets, config.num_heads), requires_grad=False)
        self.register_buffer("bias", torch.empty(config.num_heads, 2 * max_position - 1), persistent=False)
        self.bias: Tensor
        self._sizes = shape.relative_buckets, shape.max_distance, max_position

    def spread(self) -> None:
        """From buckets to distances, once the table is loaded."""
        num_buckets, max_distance, span = self._sizes
        buckets = relative_buckets(torch.arange(1 - span, span), num_buckets, max_distance)
        wide = torch.promote_types(self.table.dtype, torch.float32)
        self.bias = self.table.data[buckets.to(self.table.device)].t().to(wide).contiguous()

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", self.table


def relative_buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """T5's buckets: half of them for keys after the query; near distances have their own, farther ones by logarithm."""
    half = num_buckets // 2
    exact, far = half // 2, distances.abs()
    ratio = torch.log(far.clamp(min=1).float() / exact) / torch.log(torch.tensor(max_distance / exact))
    shared = (exact + (ratio * (half - exact)).to(torch.int64)).clamp(max=half - 1)
    return torch.where(far < exact, far, shared) + half * (distances > 0)
