"""Whisper: an encoder over a spectrogram, and a decoder that attends to its own text and to the encoder's output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.context import NORMED, AttentionContext
from slipstream.attention.cross import CrossSpec, CrossStep
from slipstream.attention.grouped_query import GroupedQueryStep, NewHeads
from slipstream.cache_spec import GroupedQuerySpec
from slipstream.checkpoints.hf_config import (
    MAX_FEED_FORWARD,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_VOCAB,
    read_architecture_name,
)
from slipstream.config import DTYPE_BYTES, ModelConfig, RopeConfig
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.kernels.elementwise.gelu import gelu
from slipstream.kernels.linear.quant_linear import default_planes
from slipstream.kernels.native.cross_stack import CrossCaches, CrossRequests, CrossStack, CrossStackLayer, cross_stack
from slipstream.kernels.native.decoder_stack import LayerTap
from slipstream.models.decoder import Decoder
from slipstream.models.encoder import LayerNorm
from slipstream.models.layers import Embedding, Layer, Linear, finish_weights, open_weights
from slipstream.models.source_encoder import EncodedLayer, SourceEncoder
from slipstream.models.speech_encoder import EPS, FRAMES_PER_ENTRY, EncoderTrunk, Positions
from slipstream.source_encoder_config import SourceEncoderConfig
from slipstream.values import describe_value
from slipstream.weights.matrix import Matrix
from slipstream.weights.registry import scheme_of

_MAX_BINS, _MAX_POSITIONS = 1 << 10, 1 << 16


class DecoderAttention(Layer):
    """Causal, over the request's text."""

    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        size, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.layer = AttentionLayer(idx, heads, heads, head_dim, head_dim**-0.5)
        self.qkv_proj = Linear(size, dict.fromkeys(("q_proj", "k_proj", "v_proj"), size), bias=True)
        self.out_proj = Linear(size, {"out_proj": size}, bias=True)

    def forward(self, x: Tensor, context: AttentionContext, cos_sin: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).view(x.shape[0], 3, -1, self.layer.head_dim).unbind(1)
        out: Tensor = self.out_proj(context.run(self.layer, NewHeads(q, k, v, cos_sin)).flatten(1))
        return out


class CrossAttention(Layer):
    """Over the output of the request's encoder."""

    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        size, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        # Its caches come after those of the layers' attention to the text.
        self.layer = AttentionLayer(config.num_layers + idx, heads, heads, head_dim, head_dim**-0.5)
        self.q_proj = Linear(size, {"q_proj": size}, bias=True)
        self.kv_proj = Linear(size, {"k_proj": size, "v_proj": size}, bias=True)
        self.out_proj = Linear(size, {"out_proj": size}, bias=True)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        q = self.q_proj(x).view(x.shape[0], -1, self.layer.head_dim)
        out: Tensor = self.out_proj(context.run(self.layer, q).flatten(1))
        return out

    def encode(self, encoded: Tensor) -> EncodedLayer:
        keys, values = self.kv_proj(encoded).view(encoded.shape[0], 2, -1, self.layer.head_dim).unbind(1)
        return EncodedLayer(self.layer.idx, keys, values)


class DecoderLayer(Layer):
    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn_layer_norm = LayerNorm(size, EPS)
        self.self_attn = DecoderAttention(config, idx)
        self.encoder_attn_layer_norm = LayerNorm(size, EPS)
        self.encoder_attn = CrossAttention(config, idx)
        self.final_layer_norm = LayerNorm(size, EPS)
        self.fc1 = Linear(size, {"fc1": config.intermediate_size}, bias=True)
        self.fc2 = Linear(config.intermediate_size, {"fc2": size}, bias=True)

    def forward(self, x: Tensor, context: AttentionContext, cos_sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), context, cos_sin)
        x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), context)
        out: Tensor = x + self.fc2(gelu(self.fc1(self.final_layer_norm(x)), False))
        return out

    def stack_layer(self) -> CrossStackLayer | None:
        """Its weights for the operation over all layers on a CPU; None: layers run one by one."""
        own, cross = self.self_attn, self.encoder_attn
        products = (own.qkv_proj, own.out_proj, cross.q_proj, cross.out_proj, self.fc1, self.fc2)
        found = [matrix for one in products if (matrix := one.matrix.stack_matrix()) is not None]
        if len(found) < len(products) or any(one.reduction is not None for one in products):
            return None
        qkv, out, query, cross_out, up, down = found
        qkv_bias, out_bias, query_bias, cross_out_bias, up_bias, down_bias = (
            cast(Tensor, one.bias) for one in products
        )
        return CrossStackLayer(
            self_norm=self.self_attn_layer_norm.weight,
            self_shift=self.self_attn_layer_norm.bias,
            qkv=qkv,
            qkv_bias=qkv_bias,
            out=out,
            out_bias=out_bias,
            cross_norm=self.encoder_attn_layer_norm.weight,
            cross_shift=self.encoder_attn_layer_norm.bias,
            query=query,
            query_bias=query_bias,
            cross_out=cross_out,
            cross_out_bias=cross_out_bias,
            norm=self.final_layer_norm.weight,
            shift=self.final_layer_norm.bias,
            up=up,
            up_bias=up_bias,
            down=down,
            down_bias=down_bias,
        )


class DecoderTrunk(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.embed_positions = Positions(config.max_position, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, idx) for idx in range(config.num_layers))
        self.layer_norm = LayerNorm(config.hidden_size, EPS)


class Trunk(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.source_encoder is not None
        self.encoder = EncoderTrunk(config.hidden_size, config.source_encoder)
        self.decoder = DecoderTrunk(config)


class Whisper(Decoder):
    layer_pattern = re.compile(r"model\.decoder\.layers\.([0-9]{1,9})\.")
    model: Any

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.model = Trunk(config)
        self._output: Matrix | None = None
        self.cross_stack: CrossStack | None = None  # all layers of the decoder as one operation, where possible
        # Positions are added to the input: the rotation of queries and keys is one by nothing.
        table = torch.zeros(max_position, 2, config.head_dim // 2, dtype=torch.float32)
        table[:, 0].fill_(1.0)
        self.cos_sin = [table] * config.num_layers
        open_weights(self, scheme_of(config.quantization))

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        return _read_config(Fields.from_dict(hf))

    @property
    def source_encoder(self) -> SourceEncoder:
        return self

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.decoder.layer_norm.weight.device
        return device

    def encode(self, features: Tensor) -> Iterator[EncodedLayer]:
        encoded = self.model.encoder(features)
        for layer in self.model.decoder.layers:
            yield layer.encoder_attn.encode(encoded)

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        return self.forward_first(input_ids, context, self.config.num_layers)

    def forward_first(self, input_ids: Tensor, context: AttentionContext, num_layers: int) -> Tensor:
        decoder = self.model.decoder
        x = decoder.embed_tokens(input_ids) + decoder.embed_positions.weight[context.positions]
        at_once = self._decode_at_once(x, context, num_layers)
        if at_once is not None:
            x = at_once
        else:
            layers = zip(decoder.layers[:num_layers], self.cos_sin[:num_layers], strict=True)
            for idx, (layer, cos_sin) in enumerate(layers):
                context.tap(idx, x)
                x = layer(x, context, cos_sin)
        context.tap(self.config.num_layers, x)
        normed: Tensor = decoder.layer_norm(x)
        context.tap(NORMED, normed)
        return normed

    def _decode_at_once(self, x: Tensor, context: AttentionContext, num_layers: int) -> Tensor | None:
        """None where this step runs layer by layer."""
        if self.cross_stack is None:
            return None
        first = self.model.decoder.layers[0]
        text: GroupedQueryStep = context.at(first.self_attn.layer)
        encoded: CrossStep = context.at(first.encoder_attn.layer)
        own, whole = text.in_place(), encoded.in_place()
        if own is None or whole is None:
            return None
        caches = CrossCaches(text.caches.in_order, encoded.backend.in_order)
        places = text.places.of(self.cos_sin[0], x.dtype)
        taps = [LayerTap(idx, out) for idx, out in context.taps.items() if 0 <= idx < num_layers]
        requests = CrossRequests(own.requests, whole.requests)
        out: Tensor = cross_stack(x, self.cross_stack, caches, places, requests, taps, num_layers)
        return out

    @property
    def output(self) -> Matrix:
        matrix: Matrix = self.model.decoder.embed_tokens.matrix
        return matrix if self._output is None else self._output

    def finish_weights(self, device: torch.device | None = None) -> None:
        device = device or self.device
        finish_weights(self, device)
        self.model.encoder.stack_layers()
        layers = [one for layer in self.model.decoder.layers if (one := layer.stack_layer()) is not None]
        if len(layers) == self.config.num_layers:
            shape = self.model.decoder.layers[0].self_attn.layer
            sizes = (shape.num_heads, shape.head_dim, EPS, shape.scale, default_planes())
            self.cross_stack = CrossStack(layers, *sizes)
        self._output = self.model.decoder.embed_tokens.matrix.for_products(device)

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        yield name, tensor
        if name.endswith(".k_proj.weight"):  # the one product without a bias, in a matrix with two that have one
            yield name.replace(".weight", ".bias"), tensor.new_zeros(tensor.shape[:1])

    def ignores(self, name: str) -> bool:
        return name == "proj_out.weight"  # the embedding once more


def _read_config(fields: Fields) -> ModelConfig:
    if (activation := fields.text("activation_function", "gelu")) != "gelu":
        raise ModelError(f"activation {describe_value(activation)} in {fields.source} is not supported; only gelu is")
    size, heads = fields.integer("d_model", high=MAX_HIDDEN), fields.integer("decoder_attention_heads", high=MAX_HEADS)
    encoder_heads = fields.integer("encoder_attention_heads", high=MAX_HEADS)
    for count in (heads, encoder_heads):
        if size % count or size // count % 2:
            raise ModelError(f"{fields.source} has {count} heads for a width of {size}; an even size each is needed")
    if not fields.flag("tie_word_embeddings", True):
        raise ModelError(f"{fields.source} says that the output has weights of its own, which is not supported")
    max_entries = fields.integer("max_source_positions", high=_MAX_POSITIONS)
    num_layers, head_dim = fields.integer("decoder_layers", high=MAX_LAYERS), size // heads
    dtype = fields.text("torch_dtype" if fields.has("torch_dtype") else "dtype", "float32")
    text, encoded = GroupedQuerySpec(heads, head_dim), CrossSpec(heads, head_dim, max_entries)
    return ModelConfig(
        architecture=read_architecture_name(fields),
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=size,
        intermediate_size=fields.integer("decoder_ffn_dim", high=MAX_FEED_FORWARD),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        rms_norm_eps=EPS,
        max_position=fields.integer("max_target_positions", high=_MAX_POSITIONS),
        rope=RopeConfig(rotary_dim=head_dim),
        tie_embeddings=True,
        embedding_scale=size**0.5 if fields.flag("scale_embedding") else 1.0,
        layer_caches=(*[text] * num_layers, *[encoded] * num_layers),
        dtype=dtype if dtype in DTYPE_BYTES else "float32",
        source_encoder=SourceEncoderConfig(
            num_bins=fields.integer("num_mel_bins", high=_MAX_BINS),
            max_frames=FRAMES_PER_ENTRY * max_entries,
            frames_per_entry=FRAMES_PER_ENTRY,
            num_layers=fields.integer("encoder_layers", high=MAX_LAYERS),
            num_heads=encoder_heads,
            intermediate_size=fields.integer("encoder_ffn_dim", high=MAX_FEED_FORWARD),
        ),
    )
