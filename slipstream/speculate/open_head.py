"""Draft heads, opened and checked before any weight is read: own checkpoints, or layers of the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.attention.choice import open_caches
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.head_checkpoint import open_head_checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.checkpoints.tensor_header import TensorHeader
from slipstream.config import DraftModel, EngineConfig, ModelConfig, NetworkSize
from slipstream.device.interface import Device
from slipstream.models.decoder import Decoder, is_mtp_tensor
from slipstream.models.heads.draft_head import DraftHead
from slipstream.models.heads.mtp import mtp_tensors
from slipstream.models.heads.network import HeadNetwork, HeadPlan, Kind
from slipstream.models.heads.read_config import check_num_layers
from slipstream.models.heads.registry import build_head, read_head
from slipstream.models.load import (
    Placement,
    built_under,
    check_tensors,
    count_bytes,
    count_parameters,
    load_weights,
    randomize_weights,
)
from slipstream.models.registry import Architecture, architecture_of
from slipstream.models.shapes import HEAD_SHAPES
from slipstream.speculate.eagle import EagleSpeculator
from slipstream.speculate.method import TargetFiles
from slipstream.speculate.speculator import MakeSpeculator

ReadTensors = Callable[[], Iterable[tuple[str, Tensor]]]


class HeadFiles(NamedTuple):
    plan: HeadPlan
    tensors: ReadTensors | None = None  # None: random ones, for benchmarks of a shape
    headers: Sequence[TensorHeader] | None = None  # of the tensors of the head


@dataclass(frozen=True)
class HeadDrafter:
    model: DraftModel
    files: HeadFiles

    def build(self, config: EngineConfig, device: Device, target: Decoder) -> MakeSpeculator:
        head = load_head(self.files, config, device, target)
        assert isinstance(head, DraftHead)
        caches = open_caches(config, self.model.config, device, for_drafter=True)
        return lambda rows, _: EagleSpeculator(config, device, head, caches, rows)


def load_head(files: HeadFiles, config: EngineConfig, device: Device, target: Decoder) -> HeadNetwork:
    with built_under(Placement.from_config(config, device.torch_device)):
        head = build_head(files.plan, target, config.scheduler.max_model_len)
    if files.tensors is None:
        randomize_weights(head)
    else:
        load_weights(head, files.tensors())
    head.finish_weights()
    return head


def read_trained_head(model: str, target: TargetFiles, kind: Kind) -> HeadFiles:
    """A head with its own checkpoint, of the kind that the user named; or a bare shape with random weights."""
    config = _read_target(target)
    if target.checkpoint is None and model in HEAD_SHAPES:
        return HeadFiles(read_head(HEAD_SHAPES[model], config))
    own = open_head_checkpoint(resolve_model(model, is_head=True))
    return HeadFiles(read_head(own.config, config, kind), own.tensors, own.headers)


def read_own_layers(checkpoint: Checkpoint, target: TargetFiles, kind: Kind) -> HeadFiles:
    """Layers in the target's checkpoint after its own."""
    config = _read_target(target)
    headers = [header for header in checkpoint.tensor_headers() if is_mtp_tensor(header.name, config.num_layers)]

    def tensors() -> Iterable[tuple[str, Tensor]]:
        return mtp_tensors(checkpoint.tensors(), config.num_layers)

    return HeadFiles(read_head(target.hf_config, config, kind), tensors, headers)


def open_head(files: HeadFiles, target: TargetFiles) -> HeadDrafter:
    return HeadDrafter(describe_head(files, target), files)


def describe_head(files: HeadFiles, target: TargetFiles) -> DraftModel:
    """Checks the headers, if there are any."""
    return _describe(files, architecture_of(target.hf_config), _read_target(target), target.placement)


def _read_target(target: TargetFiles) -> ModelConfig:
    return architecture_of(target.hf_config).read_config(target.hf_config)


def _describe(files: HeadFiles, architecture: Architecture, target: ModelConfig, placement: Placement) -> DraftModel:
    plan, headers = files.plan, files.headers
    if headers is not None:
        check_num_layers(plan, [header.name for header in headers])
    with built_under(placement._replace(device=torch.device("meta"))):
        head = build_head(plan, architecture(target, 1), 1)
        if headers is not None:
            check_tensors(head, headers)
        adopted = head.count_adopted(header.name for header in headers or ())
        num_params = count_parameters(head) + adopted
        head.finish_weights(placement.device)
    # A head may be trained on shorter texts than the target; its rotary tables cover the engine's context.
    config = replace(plan.config, max_position=max(plan.config.max_position, target.max_position))
    size = NetworkSize(num_params, count_bytes(head) + adopted * placement.dtype.itemsize)
    return DraftModel(config, size, head.num_modules)
