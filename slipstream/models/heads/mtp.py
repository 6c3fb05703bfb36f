"""MTP: layers of a target that predict more than one token. Each is a decoder layer like the target's.

Embedding and state are normed separately and joined by one product. Each layer is a module: draft i uses layer i modulo
their number. The state passed on is the one after the final norm, as is the target's. In DeepSeek every layer has its
own product and norms; Qwen3-Next has one of each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from slipstream.attention.context import AttentionContext
from slipstream.cache_spec import CacheSpec
from slipstream.checkpoints.hf_config import MAX_LAYERS, read_architecture_name
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.kernels.linear.small_linear import Epilogue
from slipstream.models.decoder import Decoder, DecoderLayer, is_mtp_tensor
from slipstream.models.fused_layer import Stream, fuse_parts, layer_parts, project_few
from slipstream.models.heads.draft_head import DraftHead
from slipstream.models.heads.network import HeadPlan
from slipstream.models.heads.read_config import DEEPSEEK_COUNT, QWEN_COUNT
from slipstream.models.layers import KeyWriter, Layer, Linear, RMSNorm
from slipstream.values import describe_value
from slipstream.weights.matrix import Slot

# Every layer of a checkpoint may repeat these; they are one matrix, shared with the target.
_SHARED = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def mtp_tensors(tensors: Iterable[tuple[str, Tensor]], num_layers: int) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in tensors if is_mtp_tensor(name, num_layers))


def read(hf: Fields, target: ModelConfig) -> HeadPlan:
    style, count = _style_and_count(hf)
    last = target.num_layers - 1  # an MTP layer is built like the target's last
    experts = target.experts
    if experts is not None:
        experts = replace(experts, layer_ids=tuple(range(count)) if target.has_experts(last) else ())
    windows = (target.window(last),) * count if target.window(last) else ()
    return HeadPlan(
        kind="mtp",
        # Tied target matrices say nothing about an embedding that the layers may bring.
        config=replace(
            target,
            num_layers=count,
            windows=windows,
            experts=experts,
            layer_caches=_layer_caches(target, count),
            tie_embeddings=False,
        ),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        target_num_layers=target.num_layers,
        mtp_style=style,
    )


def _layer_caches(target: ModelConfig, count: int) -> tuple[CacheSpec, ...]:
    """As the target's last layer, unless its kind of cache cannot be used by drafters: then attention."""
    last = target.cache_specs[-1]
    return () if last.drafter_refusal or last == target.keys_and_values else (last,) * count


def _style_and_count(hf: Fields) -> tuple[Literal["deepseek", "qwen3_next"], int]:
    names_qwen = read_architecture_name(hf).startswith("Qwen3Next")
    keys = (QWEN_COUNT, DEEPSEEK_COUNT) if names_qwen else (DEEPSEEK_COUNT, QWEN_COUNT)
    for key in keys:
        if (count := hf.get(key)) is not None:
            if type(count) is not int or not 1 <= count <= MAX_LAYERS:
                raise ModelError(f"config.json says '{key}' {describe_value(count)}: this model brings no MTP layers")
            return ("qwen3_next" if names_qwen or key == QWEN_COUNT else "deepseek"), count
    if names_qwen:
        return "qwen3_next", 1  # its configs do not mention the layer
    raise ModelError(f"config.json has neither '{DEEPSEEK_COUNT}' nor '{QWEN_COUNT}': this model brings no MTP layers")


class MtpModule(NamedTuple):
    """The parts of one module, in the order they run."""

    norms: tuple[RMSNorm, RMSNorm]  # of embedding and state
    mix: Linear
    body: DecoderLayer
    last_norm: RMSNorm


class MtpHead(DraftHead):
    # Whether the embedding at position 0 is zeroed: so some layers were trained.
    leaves_first_out: ClassVar[bool] = False

    def __init__(self, plan: HeadPlan, target: Decoder) -> None:
        super().__init__(plan, target, target.config.embedding_scale)
        self._adopted: set[str] = set()

    def rename(self, name: str) -> str:
        name = f"model.{name}" if name.startswith("layers.") else name
        return next((ours for theirs, ours in _SHARED.items() if name.endswith(f".{theirs}")), name)

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Like a tensor of the target, since the layers are of the same kind."""
        name = self.rename(name)
        return [(name, tensor)] if name in _SHARED.values() else self.borrowed.target.translate(name, tensor)

    def adopt(self, name: str, file_name: str, tensor: Tensor) -> None:
        if name not in self._adopted:
            self._adopted.add(name)
            super().adopt(name, file_name, tensor)
            return
        known: Tensor | None
        if name == "embed_tokens.weight":
            embedding = self.borrowed.embedding if self.embed_tokens is None else self.embed_tokens
            known = embedding.matrix.dequantised()
        else:
            known = self.borrowed.head if self.lm_head is None else self.lm_head.matrix.dequantised()
        assert known is not None
        if not torch.equal(self.own_copy(tensor), known):
            raise ModelError(f"tensor '{file_name}' differs from that of another MTP layer, but all share one")

    @abstractmethod
    def module(self, idx: int) -> MtpModule: ...

    def forward(self, module_idx: int, input_ids: Tensor, hidden: Tensor, context: AttentionContext) -> Tensor:
        module, cos_sin = self.module(module_idx), self.cos_sin[module_idx]
        if (fused := self.fused_for(module_idx, hidden)) is not None:
            fused.prepare(context, [cos_sin], hidden.dtype)
        joined = self.join(input_ids, hidden, module.norms, context.positions if self.leaves_first_out else None)
        if fused is None:
            out, residual = module.body(module.mix(joined), None, context, cos_sin)
            return module.last_norm.add(out, residual)[0]
        end = Epilogue(module.mix.bias, gain=module.body.input_layernorm.weight)
        x, scaled, squares = module.mix.matrix.project_few(joined, end)
        assert scaled is not None
        assert squares is not None
        state: Tensor = module.last_norm(fused.forward_scaled(Stream(x, (scaled, squares)), context, [cos_sin]))
        return state

    def only_attention(self) -> KeyWriter | None:
        return cast(KeyWriter, self.module(0).body.self_attn)

    def attended(self, input_ids: Tensor, hidden: Tensor, context: AttentionContext, few: bool) -> Tensor:
        module = self.module(0)
        joined = self.join(input_ids, hidden, module.norms, context.positions if self.leaves_first_out else None)
        mixed = project_few(module.mix, joined) if few else module.mix(joined)
        normed: Tensor = module.body.input_layernorm(mixed)
        return normed

    def finish_weights(self, device: torch.device | None = None) -> None:
        super().finish_weights(device)
        if self.borrowed.target.layer_class is not DecoderLayer or not self.config.is_plain:
            return
        modules = [self.module(idx) for idx in range(self.num_modules)]
        self.fused = [fuse_parts([layer_parts(module.body)], module.mix) for module in modules]


class DeepSeekLayer(Layer):
    def __init__(self, config: ModelConfig, target: Decoder, idx: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = Linear(2 * size, {"eh_proj": size})
        self.body = target.layer_class(config, idx)
        self.shared_head_norm = RMSNorm(size, eps)


class DeepSeekMtp(MtpHead):
    leaves_first_out: ClassVar[bool] = True

    def __init__(self, plan: HeadPlan, target: Decoder, max_position: int) -> None:
        super().__init__(plan, target)
        self.layers = nn.ModuleList(DeepSeekLayer(plan.config, target, idx) for idx in range(plan.config.num_layers))
        self.cos_sin = self.rope_tables(max_position)

    def module(self, idx: int) -> MtpModule:
        layer = self.layers[idx]
        assert isinstance(layer, DeepSeekLayer)
        return MtpModule((layer.enorm, layer.hnorm), layer.eh_proj, layer.body, layer.shared_head_norm)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """A checkpoint numbers these layers after the target's and uses the same names for all layers."""
        for name, slot in super().slots():
            _, idx, rest = name.split(".", 2)
            rest = rest.removeprefix("body.").replace("shared_head_norm.", "shared_head.norm.")
            yield f"model.layers.{self.plan.target_num_layers + int(idx)}.{rest}", slot


class QwenMtp(MtpHead):
    def __init__(self, plan: HeadPlan, target: Decoder, max_position: int) -> None:
        super().__init__(plan, target)
        config, size, eps = plan.config, plan.config.hidden_size, plan.config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(size, eps), RMSNorm(size, eps)
        self.fc = Linear(2 * size, {"fc": size})
        self.layers = nn.ModuleList(target.layer_class(config, idx) for idx in range(config.num_layers))
        self.norm = RMSNorm(size, eps)
        self.cos_sin = self.rope_tables(max_position)

    def module(self, idx: int) -> MtpModule:
        norms, body = (self.pre_fc_norm_embedding, self.pre_fc_norm_hidden), self.layers[idx]
        assert isinstance(body, DecoderLayer)
        return MtpModule(norms, self.fc, body, self.norm)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        return ((f"mtp.{name}", slot) for name, slot in super().slots())


def build(plan: HeadPlan, target: Decoder, max_position: int) -> MtpHead:
    return (DeepSeekMtp if plan.mtp_style == "deepseek" else QwenMtp)(plan, target, max_position)
