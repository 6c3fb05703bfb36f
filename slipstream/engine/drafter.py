"""What drafts for a target: opened and checked before any weight is read, built when the target is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.attention.choice import open_caches
from slipstream.config import DraftModel, EngineConfig, EngineOptions, ModelConfig, NetworkSize, speculation_of
from slipstream.device.interface import Device
from slipstream.errors import ConfigError
from slipstream.models.decoder import Decoder, is_mtp_tensor
from slipstream.models.draft_head import HeadPlan, build_head, check_num_layers, read_head
from slipstream.models.head_checkpoint import open_head_checkpoint
from slipstream.models.hub import resolve_model
from slipstream.models.load import (
    Placement,
    build_model,
    built_under,
    check_tensors,
    count_bytes,
    count_parameters,
    load_weights,
    measure_model,
    open_decoder,
    randomize_weights,
)
from slipstream.models.mtp_head import mtp_tensors
from slipstream.models.registry import Architecture, architecture_of
from slipstream.models.shapes import HEAD_SHAPES
from slipstream.models.tensor_header import TensorHeader
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.weights import Checkpoint
from slipstream.runner.runner import MakeSpeculator
from slipstream.speculate.draft_model import DraftModelSpeculator
from slipstream.speculate.eagle import EagleSpeculator
from slipstream.speculate.ngram import NgramSpeculator
from slipstream.speculate.speculator import NoSpeculator


class Drafter(Protocol):
    """A network that drafts, its weights not yet read."""

    @property
    def model(self) -> DraftModel: ...

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        """Read its weights; the target has its own, as they are in the checkpoint."""
        ...


@dataclass(frozen=True)
class DraftModelDrafter:
    """A second checkpoint."""

    model: DraftModel
    architecture: Architecture
    checkpoint: Checkpoint

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        network = build_model(self.architecture, config, device.torch_device, self.model.config)
        load_weights(network, self.checkpoint.tensors())
        network.finish_weights()
        caches = open_caches(config, self.model.config, device, for_drafter=True)
        return lambda rows: DraftModelSpeculator(config, device, network, caches, rows)


@dataclass(frozen=True)
class HeadDrafter:
    """A head over the target's hidden states: a checkpoint of its own, or layers that the target's carries."""

    model: DraftModel
    plan: HeadPlan
    tensors: Callable[[], Iterable[tuple[str, Tensor]]] | None  # None: random ones, for benchmarks of a shape

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        with built_under(Placement.of(config, device.torch_device)):
            head = build_head(self.plan, target, config.scheduler.max_model_len)
        if self.tensors is None:
            randomize_weights(head)
        else:
            load_weights(head, self.tensors())
        head.finish_weights()
        caches = open_caches(config, self.model.config, device, for_drafter=True)
        return lambda rows: EagleSpeculator(config, device, head, caches, rows)


def open_drafter(
    options: EngineOptions,
    hf_config: dict[str, Any],
    checkpoint: Checkpoint | None,
    tokenizer: Tokenizer | None,
    placement: Placement,
) -> Drafter | None:
    """None where the method needs no network. Refuses what does not fit the target."""
    speculative = speculation_of(options)
    if speculative is None or speculative.method == "ngram":
        return None
    if speculative.model is not None and speculative.method == "draft_model":
        return _open_draft_model(speculative.model, hf_config, tokenizer, placement)
    architecture = architecture_of(hf_config)
    target = architecture.read_config(hf_config)
    tensors: Callable[[], Iterable[tuple[str, Tensor]]] | None
    headers: Sequence[TensorHeader] | None
    if checkpoint is None and speculative.model in HEAD_SHAPES:
        plan = read_head(HEAD_SHAPES[speculative.model], target, "eagle3")
        tensors = headers = None
    elif speculative.model is not None:
        own = open_head_checkpoint(resolve_model(speculative.model, is_head=True))
        plan = read_head(own.config, target, "eagle3" if speculative.method == "eagle3" else "eagle")
        tensors, headers = own.tensors, own.headers
    elif checkpoint is None:
        raise ConfigError("mtp drafts with layers of the target's checkpoint; a bare shape has none")
    else:
        plan, opened = read_head(hf_config, target, "mtp"), checkpoint
        headers = [header for header in opened.tensor_headers() if is_mtp_tensor(header.name, target.num_layers)]

        def tensors() -> Iterable[tuple[str, Tensor]]:
            return mtp_tensors(opened.tensors(), target.num_layers)

    return HeadDrafter(_describe(plan, architecture, target, headers, placement), plan, tensors)


def _describe(
    plan: HeadPlan,
    architecture: Architecture,
    target: ModelConfig,
    headers: Sequence[TensorHeader] | None,
    placement: Placement,
) -> DraftModel:
    """``headers`` are those of the tensors that the head will be loaded from, which are checked; None: of none."""
    if headers is not None:
        check_num_layers(plan, [header.name for header in headers])
    with built_under(placement._replace(device=torch.device("meta"))):
        head = build_head(plan, architecture(target, 1), 1)
        if headers is not None:
            check_tensors(head, headers)
        adopted = head.count_adopted(header.name for header in headers or ())
        num_params = count_parameters(head) + adopted
        head.finish_weights(placement.device)
    # A head may be trained on shorter texts than the target; its rope goes as far as the engine does.
    config = replace(plan.config, max_position=max(plan.config.max_position, target.max_position))
    size = NetworkSize(num_params, count_bytes(head) + adopted * placement.dtype.itemsize)
    return DraftModel(config, size, head.num_modules)


def _open_draft_model(
    model: str, hf_config: dict[str, Any], tokenizer: Tokenizer | None, placement: Placement
) -> DraftModelDrafter:
    draft = open_decoder(resolve_model(model), placement.keep_blocks)
    if tokenizer is None:
        sizes = [architecture_of(config).read_config(config).vocab_size for config in (hf_config, draft.config)]
        same = sizes[0] == sizes[1]
    else:
        other = draft.tokenizer()
        sizes, same = [tokenizer.vocab_size, other.vocab_size], tokenizer.agrees_with(other)
    if not same:
        raise ConfigError(
            f"the draft model {model} has another vocabulary than the target ({sizes[1]} tokens, "
            f"{sizes[0]} there): a draft would mean another text; use a draft model of the same family"
        )
    architecture = architecture_of(draft.config)
    config = architecture.read_config(draft.config)
    for spec in config.cache_specs:
        if spec.drafter_refusal:
            raise ConfigError(
                f"the draft model {model} {spec.drafter_refusal}; use a draft model with attention alone, or ngram"
            )
    return DraftModelDrafter(DraftModel(config, measure_model(architecture, config, placement)), architecture, draft)


def without_network(config: EngineConfig) -> MakeSpeculator:
    if (speculative := config.speculative) is None:
        return lambda _rows: NoSpeculator()
    return lambda rows: NgramSpeculator(speculative, rows)
