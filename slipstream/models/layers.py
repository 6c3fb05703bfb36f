"""The layers of decoders. Each knows the names of its weights in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.context import AttentionContext
from slipstream.attention.grouped_query import GroupedQueryStep, NewHeads
from slipstream.config import ModelConfig
from slipstream.kernels.attention.rope_cache import HeadNorms
from slipstream.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from slipstream.kernels.elementwise.scaled_embedding import scaled_embedding
from slipstream.kernels.linear.small_linear import Epilogue
from slipstream.weights.dense import DenseWeight
from slipstream.weights.matrix import Matrix, Slot, StoredWeight, WeightScheme, WeightShape


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Layer(nn.Module):
    """A module without hooks: a call is its forward pass. torch's own call costs more than a small kernel.

    A network opens its weights once it is built, gives their slots to the loader, and finishes them when they are
    loaded. Each layer does so for its own tensors, not for those of layers inside it.
    """

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def open_weights(self, scheme: WeightScheme, name: str) -> None:
        """Allocate the memory whose format depends on the checkpoint. ``name`` is the layer's name in the network."""

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """Every tensor that a checkpoint must bring, by its name there, with its destination."""
        return iter(())

    def finish_weights(self, device: torch.device) -> None:
        """After loading: convert weights to the layout that multiplies fastest on this device."""


class Reduction(Protocol):
    """Sums the partial results of one product over devices that each hold some of the weight's columns."""

    def __call__(self, partial: Tensor) -> Tensor: ...


class Linear(Layer):
    """A matrix product with one stored weight, which may stack several of the checkpoint's: ``{"q_proj": 64, ...}``.

    Stacked weights turn three small products into one. With an activation the first half of the product gates the
    second. The memory layout is up to the matrix.
    """

    matrix: Matrix

    def __init__(self, in_size: int, parts: dict[str, int], bias: bool = False, activation: str = "") -> None:
        super().__init__()
        self.shape = WeightShape(in_size, parts, activation, bias)
        self.bias = _weight(self.shape.num_rows) if bias else None
        self.stored: StoredWeight | None = None  # None once the weights are finished
        self.reduction: Reduction | None = None  # applied to the product; none on one device

    def forward(self, x: Tensor) -> Tensor:
        if self.reduction is None:
            return self.matrix.project(x, self.bias)
        out = self.reduction(self.matrix.project(x, None))
        return out if self.bias is None else out + self.bias

    def open_weights(self, scheme: WeightScheme, name: str) -> None:
        names = [f"{_parent(name)}{part}" for part in self.shape.parts]
        self.hold(scheme.format_of(names).open(self.shape))

    def hold(self, stored: StoredWeight) -> None:
        self.stored = stored
        if isinstance(stored, Matrix):
            self.matrix = stored  # can be multiplied with before it is finished

    def finish_weights(self, device: torch.device) -> None:
        if self.stored is not None:
            self.matrix, self.stored = self.stored.finish(device), None

    def keep_exact(self, device: torch.device) -> None:
        """Once the weights are finished: a token's product no longer depends on the tokens beside it."""
        exact = self.matrix.exact(device)
        assert exact is not None, "resolve refuses such weights"
        self.matrix = exact

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        assert self.stored is not None, "the weights are not open"
        prefix = _parent(name)
        yield from self.stored.slots(prefix)
        if self.bias is not None:
            sizes = list(self.shape.parts.values())
            for part, bias in zip(self.shape.parts, torch.split(self.bias, sizes), strict=True):
                yield f"{prefix}{part}.bias", bias


def _parent(name: str) -> str:
    """The name of the layer around one, with a trailing dot."""
    return name[: name.rfind(".") + 1]


class RMSNorm(Layer):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _weight(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum itself as the next residual."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", self.weight


class Embedding(Layer):
    """A table with a row for each token; the output matrix as well where the model ties them."""

    matrix: Matrix

    def __init__(self, vocab_size: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.vocab_size, self.size, self.scale = vocab_size, size, scale
        self.stored: StoredWeight | None = None  # None once the weights are finished

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.scale == 1.0:
            return self.matrix.look_up(token_ids)
        if (weight := self.dense) is not None:
            return scaled_embedding(weight, token_ids, self.scale)
        return self.matrix.look_up(token_ids) * self.scale

    @property
    def dense(self) -> Tensor | None:
        """The table itself, if it is stored as plain numbers."""
        matrix = self.matrix
        return matrix.weight if isinstance(matrix, DenseWeight) else None

    @property
    def weight(self) -> Tensor:
        """The same for callers that know it is."""
        weight = self.dense
        assert weight is not None, "the embedding is not stored as plain numbers"
        return weight

    def open_weights(self, scheme: WeightScheme, name: str) -> None:
        part = name.rpartition(".")[2]
        self.hold(scheme.format_of_table(name).open(WeightShape(self.size, {part: self.vocab_size})))

    def hold(self, stored: StoredWeight) -> None:
        self.stored = stored
        if isinstance(stored, Matrix):
            self.matrix = stored

    def own_slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        assert self.stored is not None, "the weights are not open"
        return self.stored.slots(_parent(name))

    def finish_weights(self, device: torch.device) -> None:
        if self.stored is not None:
            self.matrix, self.stored = self.stored.finish_table(device), None


class KeyWriter(Protocol):
    """A layer of attention whose cached entries depend on one token each."""

    def store(self, x: Tensor, context: AttentionContext, cos_sin: Tensor, few: bool) -> None:
        """Write the entries of the tokens to the cache, and nothing else. ``few`` tokens may have another kernel."""
        ...


class Attention(Layer):
    """Grouped-query attention with rotary positions, and norms on queries and keys where the model has them."""

    def __init__(self, config: ModelConfig, idx: int) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.layer = AttentionLayer(idx, heads, kv_heads, head_dim, scale, config.window(idx))
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self.has_gate = config.attention_gate
        if self.has_gate:
            parts["q_proj_gate"] = heads * head_dim
        self.qkv_proj = Linear(config.hidden_size, parts, config.qkv_bias)
        self.o_proj = Linear(heads * head_dim, {"o_proj": config.hidden_size}, config.output_bias)
        # Of the projection: all of it, its part for keys and values, and that part's bias.
        self._part: tuple[Matrix, Matrix, Tensor | None] | None = None
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, context: AttentionContext, cos_sin: Tensor) -> Tensor:
        mixed: Tensor = self.o_proj(self.mix(self.qkv_proj(x), context, cos_sin))
        return mixed

    def mix(self, qkv: Tensor, context: AttentionContext, cos_sin: Tensor) -> Tensor:
        """What happens between the two products: [num_tokens, all heads] -> [num_tokens, query heads]."""
        q, k, v, *gate = self._heads(qkv)
        mixed = context.run(self.layer, NewHeads(q, k, v, cos_sin, self._norms()))
        return (mixed * torch.sigmoid(gate[0]) if gate else mixed).flatten(1)

    def store(self, x: Tensor, context: AttentionContext, cos_sin: Tensor, few: bool) -> None:
        """Write keys and values of the tokens to the cache, and nothing else. ``few`` tokens have another kernel."""
        layer, matrix, bias = self.layer, *self._keys_and_values()
        few = few and matrix.tile_key("plain") is not None
        made = matrix.project_few(x, Epilogue(bias)).out if few else matrix.project(x, bias)
        k, v = made.view(made.shape[0], -1, layer.head_dim).chunk(2, dim=1)
        step: GroupedQueryStep = context.at(layer)
        step.store(layer, k, v, cos_sin, self._norms())

    def _keys_and_values(self) -> tuple[Matrix, Tensor | None]:
        """The part of the projection for keys and values, and its bias."""
        if self._part is None or self._part[0] is not self.qkv_proj.matrix:
            layer, qkv = self.layer, self.qkv_proj
            first, count = layer.num_heads * layer.head_dim, 2 * layer.num_kv_heads * layer.head_dim
            bias = None if qkv.bias is None else qkv.bias[first : first + count]
            self._part = (qkv.matrix, qkv.matrix.rows(first, count), bias)
        return self._part[1:]

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values and, where present, gates: [num_tokens, heads, head_dim] each."""
        layer = self.layer
        counts = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads, *[layer.num_heads] * self.has_gate]
        return torch.split(qkv.view(qkv.shape[0], -1, layer.head_dim), counts, dim=1)

    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class FeedForward(Layer):
    """The gated feed-forward layer of Llama and its relatives."""

    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        size = config.intermediate_size if size is None else size
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(config.hidden_size, parts, config.mlp_bias, config.activation)
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, config.mlp_bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out


def open_weights(network: nn.Module, scheme: WeightScheme) -> None:
    """Allocate memory for the weights of a network that was just built, under the same device and type."""
    for name, layer in _layers(network):
        layer.open_weights(scheme, name)


def checkpoint_slots(network: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Every tensor that the network's layers need from a checkpoint, by its name there."""
    for name, layer in _layers(network):
        yield from layer.own_slots(name)


def finish_weights(network: nn.Module, device: torch.device) -> None:
    for _, layer in _layers(network):
        layer.finish_weights(device)


def _layers(network: nn.Module) -> list[tuple[str, Layer]]:
    return [(name, module) for name, module in network.named_modules() if isinstance(module, Layer)]
