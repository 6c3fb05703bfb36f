"""From user options to a running engine core: open the model, resolve the configuration, put the parts together."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.attention.reference import ReferenceBackend
from slipstream.config import EngineConfig, EngineOptions, resolve
from slipstream.device import open_device
from slipstream.engine.core import EngineCore
from slipstream.models.hub import resolve_model
from slipstream.models.load import build_model, load_weights, randomize_weights
from slipstream.models.registry import architecture_of
from slipstream.models.shapes import shape_config
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.weights import Checkpoint, open_checkpoint
from slipstream.runner.runner import Runner
from slipstream.scheduler.scheduler import Scheduler
from slipstream.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Engine:
    """A core with what the front door needs beside it."""

    config: EngineConfig
    core: EngineCore
    tokenizer: Tokenizer | None  # None for a bare shape with random weights
    defaults: SamplingParams  # from the model's generation config
    eos_token_ids: tuple[int, ...]


def build_engine(options: EngineOptions) -> Engine:
    checkpoint = open_checkpoint(resolve_model(options.model))
    tokenizer = checkpoint.tokenizer()
    return _assemble(options, checkpoint.config, checkpoint, tokenizer)


def build_shape(options: EngineOptions, shape: str) -> Engine:
    """An engine over random weights of a known shape, for benchmarks."""
    return _assemble(options, shape_config(shape), None, None)


def _assemble(
    options: EngineOptions, hf_config: dict[str, object], checkpoint: Checkpoint | None, tokenizer: Tokenizer | None
) -> Engine:
    architecture = architecture_of(hf_config)
    device = open_device(options.device)
    config = resolve(options, device.hardware(options.dtype), architecture.read_config(hf_config))
    model = build_model(architecture, config, device.torch_device)
    if checkpoint is None:
        randomize_weights(model)
    else:
        load_weights(model, checkpoint.tensors())
    runner = Runner(config, device, model, ReferenceBackend())
    core = EngineCore(Scheduler(config.scheduler, config.cache), runner, config.steps_in_flight)
    generation = checkpoint.generation_config if checkpoint is not None else {}
    return Engine(config, core, tokenizer, sampling_defaults(generation), _eos_ids(generation, hf_config, tokenizer))


def sampling_defaults(generation: dict[str, object]) -> SamplingParams:
    """The sampling part of a generation_config.json. Without do_sample the model's authors mean greedy."""
    known = {name: generation[name] for name in ("temperature", "top_k", "top_p") if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        return SamplingParams(temperature=0.0)
    return SamplingParams.from_dict(known)


def _eos_ids(
    generation: dict[str, object], hf_config: dict[str, object], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's list counts most, for chat models end on more than one token."""
    found: dict[int, None] = {}
    for source in (generation.get("eos_token_id"), hf_config.get("eos_token_id")):
        for token_id in source if isinstance(source, list) else [source]:
            if isinstance(token_id, int):
                found[token_id] = None
        if found:
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found[tokenizer.eos_token_id] = None
    return tuple(found)
