"""What all networks that draft on a target's hidden states share: a plan, the target's weights, and loading.

A head is described (``read_head``, from its config alone), built (``build_head``) and loaded (``load_weights``, as any
network). When it runs is decided in ``speculate``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.models.decoder import COMPUTED_TENSORS, Decoder
from slipstream.models.layers import Embedding, Linear, checkpoint_slots, finish_weights
from slipstream.models.rope import layer_tables
from slipstream.weights.dense import DenseWeight
from slipstream.weights.matrix import Slot, WeightShape

Kind = Literal["eagle", "eagle3", "mtp", "dflash"]

# Checkpoints may carry these; they are computed here, or were only used in training.
_IGNORED = (*COMPUTED_TENSORS, "verifier_norm.weight", "verifier_lm_head.weight")


class BlockPlan(NamedTuple):
    """Of a head that drafts a block of tokens in one pass."""

    size: int  # tokens of a block: the newest token and masks
    mask_id: int  # the target's token whose embedding masks have
    is_causal: tuple[bool, ...]  # of each layer; otherwise tokens of a block see each other
    samples_anchor: bool = False  # whether the first draft comes from the newest token, and not from the first mask
    logit_scale: float = 1.0
    softcap: float | None = None  # of the logits
    embedding_scale: float = 1.0

    @property
    def max_drafts(self) -> int:
        return self.size if self.samples_anchor else self.size - 1


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
    block: BlockPlan | None = None

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


class HeadNetwork(nn.Module):
    """What heads have in common: own weights, and the target's. Build it under the target's device and type."""

    source: ClassVar[str] = "the draft head"
    cos_sin: list[Tensor]  # rotary tables, by layer or by module

    num_modules = 1  # draft i uses module i modulo their number

    def __init__(self, plan: HeadPlan, target: Decoder) -> None:
        super().__init__()
        self.plan = plan
        self.config = config = plan.config
        self.taps = plan.taps
        self.borrowed = Borrowed(target)
        self.hints: dict[str, str] = {}
        size = config.hidden_size
        self.embed_tokens = Embedding(plan.target_vocab_size, size) if plan.needs_embedding else None
        self.lm_head = Linear(size, {"lm_head": config.vocab_size}) if plan.needs_head else None
        self._maps: dict[str, Tensor] = {}  # d2t and t2d, as the checkpoint brought them
        self.target_ids: Tensor | None = None  # [draft_vocab] int32: the target's id of each draft id
        if config.vocab_size != plan.target_vocab_size:
            self.target_ids = torch.arange(config.vocab_size, dtype=torch.int32)

    def project_logits(self, hidden: Tensor) -> Tensor:
        """Logits by the head's own output matrix, else by the target's."""
        if self.lm_head is None:
            return self.borrowed.target.compute_logits(hidden)
        return self.lm_head.matrix.project_wide(hidden)

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
