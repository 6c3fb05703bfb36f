"""Draft heads: small networks that continue from the target's hidden states. Their common parts and their loading.

A head is described (``read_head``, from its config alone), built (``build_head``) and loaded (``load_weights``, as any
network). The networks are in ``eagle_head``, ``eagle3_head`` and ``mtp_head``. When a head runs is decided in
``speculate``.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.attention.context import AttentionContext
from slipstream.checkpoints.hf_config import layer_windows, read_architecture_name
from slipstream.checkpoints.speculators_format import is_speculators, plain_config
from slipstream.config import ModelConfig
from slipstream.errors import ModelError, nearest
from slipstream.fields import Fields
from slipstream.kernels.elementwise.scaled_embedding import scaled_embedding
from slipstream.kernels.step.draft_states import join_states
from slipstream.models.decoder import COMPUTED_TENSORS, Decoder
from slipstream.models.fused_layer import FusedLayers, prepare_attention
from slipstream.models.layers import (
    Attention,
    Embedding,
    Linear,
    RMSNorm,
    checkpoint_slots,
    finish_weights,
    open_weights,
)
from slipstream.models.registry import architecture_of
from slipstream.models.rope import layer_tables
from slipstream.values import describe_value
from slipstream.weights.dense import DenseWeight
from slipstream.weights.eight_bits import EightBits, can_round
from slipstream.weights.matrix import Slot, WeightScheme, WeightShape
from slipstream.weights.registry import scheme_of

Kind = Literal["eagle", "eagle3", "mtp"]

_MODULES: dict[Kind, str] = {
    "eagle": "slipstream.models.heads.eagle",
    "eagle3": "slipstream.models.heads.eagle3",
    "mtp": "slipstream.models.heads.mtp",
}
_ARCHITECTURES: dict[str, Kind] = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "EagleSpeculator": "eagle",
}
# The decoder layers a head may consist of, by ``model_type``. The first EAGLE heads use these names for themselves.
_BODIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# The number of MTP layers of a target: the key that DeepSeek uses, and Qwen's.
DEEPSEEK_COUNT, QWEN_COUNT = "num_nextn_predict_layers", "mtp_num_hidden_layers"

_SHOWN = 60  # characters of a value in a message
# Keys with these parts in their names describe variants of the network. An unknown one must not be ignored.
_VARIANT_WORDS = ("norm", "eagle", "draft", "fusion", "aux_hidden", "fc_")
# Checkpoints may carry these; they are computed here, or were only used in training.
_IGNORED = (*COMPUTED_TENSORS, "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True)
class HeadPlan:
    """Everything in a head's config, checked against the target."""

    kind: Kind
    config: ModelConfig  # of the head's decoder layers; its vocabulary is the draft vocabulary
    target_hidden_size: int
    target_vocab_size: int
    target_num_layers: int
    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False  # required by the config; a bias that the config does not mention is used as well
    mtp_style: Literal["deepseek", "qwen3_next"] | None = None

    @property
    def needs_embedding(self) -> bool:
        """Whether the head must bring an embedding because the target's cannot replace it."""
        return self.config.hidden_size != self.target_hidden_size

    @property
    def needs_head(self) -> bool:
        tied = self.config.tie_embeddings
        return self.config.vocab_size != self.target_vocab_size or (self.needs_embedding and not tied)


class Borrowed(NamedTuple):
    """The target, wrapped so that its weights do not count as the head's."""

    target: Decoder

    @property
    def embedding(self) -> Embedding:
        return self.target.model.embed_tokens

    @property
    def like(self) -> Tensor:
        """A tensor of the device and type that the target computes in."""
        return self.target.model.norm.weight

    @property
    def head(self) -> Tensor | None:
        """The weight of the target's logits, unless it is kept in another layout only."""
        output = self.target.output
        return output.dequantised() if isinstance(output, DenseWeight) else None


class DraftHead(nn.Module, ABC):
    """One pass drafts one token for each sequence. Build it under the device and type of the target."""

    source: ClassVar[str] = "the draft head"
    cos_sin: list[Tensor]  # rotary tables, by layer or by module

    def __init__(self, plan: HeadPlan, target: Decoder, embedding_scale: float = 1.0) -> None:
        super().__init__()
        self.plan = plan
        self.config = config = plan.config
        self.taps = plan.taps
        self.num_modules = config.num_layers if plan.kind == "mtp" else 1
        self.borrowed = Borrowed(target)
        self.embedding_scale = embedding_scale
        self.fused: list[FusedLayers | None] = []  # by module, where it makes a pass of few tokens faster
        self.hints: dict[str, str] = {}
        size = config.hidden_size
        self.embed_tokens = Embedding(plan.target_vocab_size, size) if plan.needs_embedding else None
        self.lm_head = Linear(size, {"lm_head": config.vocab_size}) if plan.needs_head else None
        self._maps: dict[str, Tensor] = {}  # d2t and t2d, as the checkpoint brought them
        self.target_ids: Tensor | None = None  # [draft_vocab] int32: the target's id of each draft id
        if config.vocab_size != plan.target_vocab_size:
            self.target_ids = torch.arange(config.vocab_size, dtype=torch.int32)

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
            prepare_attention(context, [attention], [cos_sin], hidden.dtype)
        attention.store(self.attended(input_ids, hidden, context, few), context, cos_sin, few)

    @abstractmethod
    def only_attention(self) -> Attention | None:
        """The attention of the first module, if it has one layer."""

    @abstractmethod
    def attended(self, input_ids: Tensor, hidden: Tensor, context: AttentionContext, few: bool) -> Tensor:
        """The input of that attention's projection. ``few`` tokens have kernels of their own."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, draft_vocab], in float32 at least, from the output of ``forward``."""
        return self.project_logits(hidden)

    def project_logits(self, hidden: Tensor) -> Tensor:
        """Logits by the head's own output matrix, else by the target's."""
        if self.lm_head is None:
            return self.borrowed.target.compute_logits(hidden)
        return self.lm_head.matrix.project_wide(hidden)

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
                table = embedding.matrix.look_up(input_ids) * self.embedding_scale
            else:
                table = scaled_embedding(table, input_ids, self.embedding_scale)
            input_ids = torch.arange(hidden.shape[0], dtype=torch.int32, device=hidden.device)
        return join_states(hidden, table, input_ids, gains[0], gains[1], self.config.rms_norm_eps, positions)

    def fused_for(self, module_idx: int, x: Tensor) -> FusedLayers | None:
        """The module's fused layers, where they are faster for this number of tokens."""
        fused = self.fused[module_idx] if self.fused else None
        return fused if fused is not None and x.shape[0] <= fused.max_tokens else None

    def finish_weights(self, device: torch.device | None = None) -> None:
        """After loading: convert the head's own weights to the layout that multiplies fastest."""
        finish_weights(self, next(self.parameters()).device if device is None else device)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        return checkpoint_slots(self)

    def rename(self, name: str) -> str:
        """A checkpoint's tensor, by the names of ``slots`` and ``optional``."""
        name = name.removeprefix("model.")
        return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        return [(self.rename(name), tensor)]

    def optional(self) -> dict[str, Tensor]:
        size, target_size = self.config.vocab_size, self.plan.target_vocab_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.embed_tokens is None:
            shapes["embed_tokens.weight"] = (target_size, self.config.hidden_size)
        if self.lm_head is None:
            shapes["lm_head.weight"] = (size, self.config.hidden_size)
        weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        maps = {"d2t": size, "t2d": target_size}
        return weights | {name: torch.empty(n, dtype=torch.int64, device="meta") for name, n in maps.items()}

    def count_adopted(self, file_names: Iterable[str]) -> int:
        """An upper bound of the parameters in optional weights; copies of the target's are dropped in ``adopt``."""
        given = {self.rename(name) for name in file_names}
        weights = [tensor for name, tensor in self.optional().items() if name in given and tensor.is_floating_point()]
        return sum(weight.numel() for weight in weights)

    def adopt(self, name: str, file_name: str, tensor: Tensor) -> None:
        if name in ("d2t", "t2d"):
            self._maps[name] = tensor.cpu()
            return
        own = self.own_copy(tensor)
        if name == "embed_tokens.weight":
            # A copy of the target's embedding, as many heads bring, is dropped unless it is the output matrix as well.
            if self.config.tie_embeddings or not torch.equal(own, self.borrowed.embedding.matrix.dequantised()):
                self.embed_tokens = _embedding_of(own)
        else:
            theirs = self.borrowed.head
            if theirs is None or not torch.equal(own, theirs):
                self.lm_head = _linear_of("lm_head", own)

    def own_copy(self, tensor: Tensor) -> Tensor:
        """A copy on the device and in the type of the target's weights."""
        return self.borrowed.like.new_empty(tensor.shape).copy_(tensor)

    def ignores(self, name: str) -> bool:
        return name.endswith(_IGNORED)

    def finish_loading(self) -> None:
        if self.config.tie_embeddings and self.lm_head is None and self.embed_tokens is not None:
            # The head's own embedding is its output matrix too.
            self.lm_head = _linear_of("lm_head", self.embed_tokens.weight)
        self.target_ids = self._read_target_ids()

    def _read_target_ids(self) -> Tensor | None:
        """The target's id of each draft id, by ``d2t`` checked with ``t2d``; None where draft ids are the target's."""
        size, target_size = self.config.vocab_size, self.plan.target_vocab_size
        d2t, t2d = self._maps.get("d2t"), self._maps.get("t2d")
        if d2t is None:
            if size != target_size:
                raise ModelError(
                    f"the draft head lacks the tensor 'd2t', though it drafts {size} of the target's "
                    f"{target_size} tokens"
                )
            return None
        drafts = torch.arange(size, device="cpu")
        target_ids = drafts + d2t.long()
        if target_ids.min() < 0 or target_ids.max() >= target_size:
            raise ModelError(f"tensor 'd2t' maps to tokens that the target, with {target_size}, does not have")
        if len({*target_ids.tolist()}) != size:
            raise ModelError("tensor 'd2t' maps two draft tokens to one of the target")
        if t2d is not None and (int(t2d.bool().sum()) != size or not bool(t2d.bool()[target_ids].all())):
            raise ModelError("tensor 't2d' does not mark the tokens that 'd2t' maps to")
        if size == target_size and torch.equal(target_ids, drafts):
            return None
        return target_ids.to(self.borrowed.like.device, torch.int32)

    def rope_tables(self, max_position: int) -> list[Tensor]:
        """One table for each decoder layer."""
        return layer_tables(self.config, max_position, next(self.parameters()).device)


def _embedding_of(weight: Tensor) -> Embedding:
    made = Embedding(*weight.shape)
    made.hold(DenseWeight(WeightShape(made.size, {"embed_tokens": made.vocab_size}), weight))
    return made


def _linear_of(name: str, weight: Tensor) -> Linear:
    made = Linear(weight.shape[1], {name: weight.shape[0]})
    made.hold(DenseWeight(made.shape, weight))
    return made


# --- reading a config -----------------------------------------------------------------------------


def read_head(hf_config: dict[str, Any], target: ModelConfig, kind: Kind | None = None) -> HeadPlan:
    """Which kind of head a config describes, and all its settings.

    ``kind`` is the method that the user named. It decides where the config does not: the first EAGLE heads have the
    name of their decoder layer, and MTP layers are described by the config of the target that carries them.
    """
    hf = Fields.from_dict(hf_config, "the head's config.json")
    if is_speculators(hf):
        hf = plain_config(hf)
    elif hf.get("model_type") == "eagle" and isinstance(hf.get("model"), dict):
        # vLLM's first converter wrote it like this: the head's config inside another.
        hf = hf.changed(**{"model": None, **hf["model"], "architectures": ["EagleLlamaForCausalLM"]})
    expectations = (("architectures", list, "a list of names"), ("eagle_config", dict, "an object"))
    for key, value_type, expected in expectations:
        if hf.get(key) is not None and not isinstance(hf[key], value_type):
            raise ModelError(f"'{key}' in the head's config.json must be {expected}, not {describe_value(hf[key])}")
    plan: HeadPlan = importlib.import_module(_MODULES[_kind_of(hf, kind)]).read(hf, target)
    return plan


def build_head(plan: HeadPlan, target_model: Decoder, max_position: int) -> DraftHead:
    """The network without its weights. Call it under the device and the type it runs with."""
    head: DraftHead = importlib.import_module(_MODULES[plan.kind]).build(plan, target_model, max_position)
    open_weights(head, _scheme_beside(target_model.config, plan.config))
    return head


def _scheme_beside(target: ModelConfig, head: ModelConfig) -> WeightScheme:
    """A head of plain numbers beside a target that stays quantised is rounded; it would read more than the target."""
    if head.quantization is None and target.quantization is not None and can_round():
        return EightBits()
    return scheme_of(head.quantization)


def _kind_of(hf: Fields, named: Kind | None) -> Kind:
    name = read_architecture_name(hf)
    found = _ARCHITECTURES.get(name)
    if found is None and named is None and (hf.get(DEEPSEEK_COUNT) or hf.get(QWEN_COUNT)):
        return "mtp"
    if found is None and (named == "mtp" or name in _BODIES.values()):
        found = named
    if found is None:
        raise ModelError(
            f"architecture {describe_value(name)} is not that of a draft head{nearest(name, _ARCHITECTURES)} "
            f"(supported: {', '.join(_ARCHITECTURES)})"
        )
    if named not in (None, found):
        raise ModelError(f"architecture '{name}' is that of a head for the method {found}, not for {named}")
    return found


def read_body(hf: Fields) -> ModelConfig:
    """The shape of the head's decoder layers."""
    model_type = str(hf.get("model_type") or "llama")[:_SHOWN]
    if model_type not in _BODIES:
        raise ModelError(
            f"'model_type' of the head is '{model_type}', which is not supported; supported: {', '.join(_BODIES)}"
        )
    config = architecture_of({"architectures": [_BODIES[model_type]]}).read_config(hf)
    if hf.texts("layer_types"):
        # Trained heads may have a window where the architecture itself has none.
        config = replace(config, windows=layer_windows(hf, lambda _: False))
    return config


def read_flag(hf: Fields, key: str, default: bool = False) -> bool:
    """A flag of the head's network, at top level or in ``eagle_config``."""
    for fields in (hf, hf.get("eagle_config") or {}):
        if (value := fields.get(key)) is not None:
            if not isinstance(value, bool):
                raise ModelError(
                    f"'{key}' in the head's config.json must be true or false, not {describe_value(value)}"
                )
            return value
    return default


def check_variant(hf: Fields, known: Collection[str], fixed: dict[str, Any]) -> None:
    """Refuse settings of another network: ignoring a flag silently would only lower acceptance.

    ``known`` keys are read; keys in ``fixed`` must have the one value that this network implements.
    """
    for prefix, inner in (("", hf), ("eagle_config.", hf.get("eagle_config") or {})):
        for key, value in inner.items():
            if key in fixed and value is not None and value != fixed[key]:
                raise ModelError(
                    f"'{prefix}{key}' in the head's config.json is {describe_value(value)}; "
                    f"only {fixed[key]!r} is supported"
                )
            suspicious = bool(prefix) or any(word in key for word in _VARIANT_WORDS)
            if value and suspicious and key not in (*known, *fixed, "rms_norm_eps", "eagle_config"):
                raise ModelError(
                    f"{describe_value(prefix + key)} in the head's config.json is a variant that is not known"
                    f"{nearest(key, known)}"
                )


def check_num_layers(plan: HeadPlan, names: Collection[str]) -> None:
    """Called before any layer is built: each layer has more than one tensor."""
    if plan.config.num_layers > max(1, len(names)):
        raise ModelError(
            f"the draft head has {len(names)} tensors, too few for the {plan.config.num_layers} layers of its config"
        )
