"""From user options to a running engine core: open the model, resolve the configuration, connect the parts."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from slipstream.attention.backend import Caps
from slipstream.attention.choice import open_caches
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.config import GIB, WEIGHT_FORMATS, EngineConfig, EngineOptions
from slipstream.device import choose_device, open_device
from slipstream.device.interface import Device
from slipstream.engine.core import EngineCore
from slipstream.engine.find_models import resolve_models
from slipstream.engine.resolve import resolve, resolve_dtype
from slipstream.errors import ConfigError, ModelError, RequestError, nearest
from slipstream.fields import Fields
from slipstream.grammar import guidance
from slipstream.grammar.constraints import Constraints, MaskLimits
from slipstream.grammar.threads import WorkerThreads
from slipstream.graphs.mode import CUDAGraphMode, usable_mode
from slipstream.host_drafting import HostProposer
from slipstream.kernels import native
from slipstream.models.decoder import Decoder
from slipstream.models.load import (
    OnLoaded,
    Placement,
    build_model,
    load_weights,
    measure_model,
    open_decoder,
    randomize_weights,
    report_loading,
)
from slipstream.models.pooled_head import open_pair_judge, open_pooled_head
from slipstream.models.registry import Architecture, architecture_of
from slipstream.models.shapes import shape_config
from slipstream.pooling import PoolingDefaults
from slipstream.runner.runner import Runner
from slipstream.runner.step_timing import OnCost
from slipstream.sampling_params import MODEL_DEFAULTS, SamplingParams
from slipstream.scheduler.draft_length import AdaptiveLength, DraftLength
from slipstream.scheduler.scheduler import Scheduler
from slipstream.scheduler.step_costs import StepCosts
from slipstream.speculate.method import Drafter, TargetFiles
from slipstream.speculate.options import read_speculation
from slipstream.speculate.registry import find_method
from slipstream.speculate.speculator import draft_nothing
from slipstream.text.tokenizer import Tokenizer

logger = logging.getLogger("slipstream.engine")

# Masks of tokens that the device keeps. A document has a few dozen different ones, a schema some hundreds.
_MAX_MASKS = 4096
_MAX_MASK_BYTES = 64 << 20


@dataclass(frozen=True)
class EngineInfo:
    """What clients need to know of an engine, wherever it runs."""

    config: EngineConfig
    tokenizer: Tokenizer | None  # None for a bare shape with random weights
    defaults: SamplingParams  # from the model's generation config
    eos_token_ids: tuple[int, ...]
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)  # how the checkpoint's vectors are made
    model_path: str = ""  # of the checkpoint's files on this machine


@dataclass(frozen=True, kw_only=True)
class Engine(EngineInfo):
    core: EngineCore

    def describe(self) -> EngineInfo:
        """The same without the engine."""
        return EngineInfo(self.config, self.tokenizer, self.defaults, self.eos_token_ids, self.pooling, self.model_path)


def build_engine(options: EngineOptions, on_loaded: OnLoaded | None = None) -> Engine:
    options = resolve_models(options)
    checkpoint = open_target(options)
    tokenizer = checkpoint.tokenizer()
    return _assemble(options, checkpoint.config, checkpoint, tokenizer, on_loaded)


def build_serving_engine(options: EngineOptions) -> Engine:
    """An engine for requests that have nothing to do with each other: none may wait for what the first of a kind needs.

    It costs tenths of a second of the start, which a script that generates a few texts need not pay.
    """
    # What is cut by measured times is cut in another way in every run: programs that generate have full steps.
    prefer = "balance" if options.prefer == "auto" else options.prefer
    engine = build_engine(replace(options, prefer=prefer))
    engine.core.prepare_to_serve()
    return engine


def open_target(options: EngineOptions) -> Checkpoint:
    return open_decoder(resolve_model(options.model), keep_blocks=_keep_blocks(options))


def _keep_blocks(options: EngineOptions) -> bool:
    """Whether quantised weights of GGUF files stay in their blocks, which only the CPU kernels read."""
    if options.weight_format not in WEIGHT_FORMATS:
        hint = nearest(options.weight_format, WEIGHT_FORMATS)
        raise ConfigError(
            f"weight_format must be one of {', '.join(WEIGHT_FORMATS)}, not '{options.weight_format}'{hint}"
        )
    if options.weight_format == "float":
        return False
    can = (
        choose_device(options.device) == "cpu" and options.dtype in ("auto", "float32") and native.library() is not None
    )
    if options.weight_format == "stored" and not can:
        raise ConfigError(
            "weight_format stored needs device cpu, dtype float32 and a C compiler; use weight_format auto"
        )
    return can


def build_shape(options: EngineOptions, shape: str, tokenizer: Tokenizer | None = None) -> Engine:
    """An engine over random weights of a known shape, for benchmarks."""
    return _assemble(options, shape_config(shape), None, tokenizer)


class EnginePlan(NamedTuple):
    """Everything decided, nothing allocated."""

    architecture: Architecture
    device: Device
    config: EngineConfig
    drafter: Drafter | None


def plan_engine(
    options: EngineOptions,
    hf_config: dict[str, Any],
    checkpoint: Checkpoint | None = None,
    tokenizer: Tokenizer | None = None,
) -> EnginePlan:
    """Resolve the configuration, and refuse what does not fit the target or this machine's memory.

    The checkpoint and its tokenizer are the target's, for drafters that need them.
    """
    architecture = architecture_of(hf_config)
    device = open_device(options.device)
    hardware = device.hardware(options.dtype)
    model = architecture.read_config(hf_config)
    if options.max_model_len is None and checkpoint is not None and (limit := checkpoint.text_limit()) is not None:
        options = replace(options, max_model_len=min(limit, model.max_position))
    dtype = getattr(torch, resolve_dtype(options.dtype, hardware, model))
    placement = Placement(device.torch_device, dtype, _keep_blocks(options))
    drafter, speculative = None, read_speculation(options)
    if speculative is not None:
        if not model.has_logits:
            raise ConfigError(
                f"{model.architecture} encodes texts and generates none, so nothing can be drafted for it"
            )
        files = TargetFiles(hf_config, checkpoint, tokenizer, placement)
        drafter = find_method(speculative.method).open(speculative, files)
    draft = None if drafter is None else drafter.model
    size = measure_model(architecture, model, placement)
    config = resolve(options, hardware, model, size, draft)
    if config.scheduler.prefix_caching_refused:
        logger.warning(config.scheduler.prefix_caching_refused)
    needed = size.num_bytes + (0 if draft is None else draft.size.num_bytes) + config.cache_bytes
    free = hardware.free_memory_bytes
    if needed > free:
        raise ConfigError(
            f"the model in {config.dtype} needs {needed / GIB:.1f} GiB for weights and KV cache, "
            f"{free / GIB:.1f} GiB are free; use a smaller model, a 16-bit dtype or kv_cache_memory_bytes"
        )
    return EnginePlan(architecture, device, config, drafter)


def _assemble(
    options: EngineOptions,
    hf_config: dict[str, Any],
    checkpoint: Checkpoint | None,
    tokenizer: Tokenizer | None,
    on_loaded: OnLoaded | None = None,
) -> Engine:
    architecture, device, config, drafter = plan_engine(options, hf_config, checkpoint, tokenizer)
    generation = checkpoint.generation_config if checkpoint is not None else {}
    defaults = sampling_defaults(generation)
    eos_token_ids = _eos_ids(generation, hf_config, tokenizer, config.model.vocab_size)
    try:
        with device.sync_guard.allow("build"):
            model = build_model(architecture, config, device.torch_device)
            if checkpoint is None:
                randomize_weights(model)
            else:
                load_weights(model, report_loading(checkpoint, on_loaded))
            pooling = _open_pooling(checkpoint, tokenizer, config, model)
            make_speculator = draft_nothing if drafter is None else drafter.build(config, device, model)
            model.finish_weights()
            if config.exact:
                model.keep_exact()
            caches = open_caches(config, config.model, device)
            draft_length, on_cost = decide_draft_length(config, caches.caps)
            runner = Runner(config, device, model, caches, make_speculator, on_cost)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the GPU's memory ran out while the engine was built: lower gpu_memory_utilization (now "
            f"{options.gpu_memory_utilization}), max_num_batched_tokens ({config.scheduler.max_num_batched_tokens}) or "
            f"max_num_seqs ({config.scheduler.max_num_seqs}), or free memory that other processes hold"
        ) from error
    _keep_memory(device)
    scheduler = Scheduler(config.scheduler, config.cache, draft_length, _open_host_proposer(config))
    constraints = _open_constraints(config, tokenizer, eos_token_ids, runner)
    core = EngineCore(scheduler, runner, config.steps_in_flight, constraints)
    path = "" if checkpoint is None else str(checkpoint.path)
    return Engine(config, tokenizer, defaults, eos_token_ids, pooling, path, core=core)


def _open_pooling(
    checkpoint: Checkpoint | None, tokenizer: Tokenizer | None, config: EngineConfig, model: Decoder
) -> PoolingDefaults:
    """How vectors and scores are made; gives the model its dense layers after pooling."""
    defaults, scoring = PoolingDefaults(), None
    if checkpoint is not None:
        defaults = checkpoint.pooling_defaults()
        head, scoring = open_pooled_head(checkpoint, model.classifier, config.model.hidden_size)
        if (
            head is None
            and tokenizer is not None
            and config.model.has_logits
            and not (defaults.is_all or defaults.is_stated)
        ):
            head, scoring = open_pair_judge(model, tokenizer)
        if head is not None:
            model.pooled_head = head.to(model.device, getattr(torch, config.dtype))
    defaults = replace(defaults, scoring=scoring)
    return defaults if config.model.has_logits else defaults.of_encoder()


def _open_constraints(
    config: EngineConfig, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...], runner: Runner
) -> Constraints | None:
    """None where no request can be constrained: there are no texts, or they have no end."""
    if tokenizer is None or not eos_token_ids or not config.model.has_logits or guidance.library() is None:
        return None
    vocab_size, num_logits = config.model.vocab_size, runner.buffers.max_num_logits
    num_masks = max(num_logits, min(_MAX_MASKS, _MAX_MASK_BYTES // (vocab_size // 8 + 1)))
    runner.open_masks(num_masks)
    limits = MaskLimits(vocab_size, num_logits, num_masks, config.num_drafts)
    backend = guidance.Guidance(tokenizer, vocab_size, eos_token_ids)
    return Constraints(backend, WorkerThreads(), limits, eos_token_ids)


def _open_host_proposer(config: EngineConfig) -> HostProposer | None:
    speculative = config.speculative
    if speculative is None or not speculative.needs.host_drafts:
        return None
    return find_method(speculative.method).think_on_host(speculative)


def decide_draft_length(config: EngineConfig, caps: Caps) -> tuple[DraftLength | None, OnCost | None]:
    """The policy for the draft length and the callback that records step costs; None where the length is fixed."""
    speculative = config.speculative
    if speculative is None or not speculative.adaptive:
        return None, None
    mode = usable_mode(CUDAGraphMode(config.cudagraph_mode), caps)
    costs = StepCosts(in_graphs=mode.decode_mode() is CUDAGraphMode.FULL)
    lengths = (speculative.lengths, speculative.initial_length)
    num_rows = config.scheduler.max_num_seqs
    rehearsal = None
    if speculative.depends_on_text_alone:
        rehearsal = find_method(speculative.method).rehearse(speculative, num_rows)
    knows, num_proposed = speculative.knows_acceptance, speculative.num_proposed
    policy = AdaptiveLength(*lengths, num_rows, costs, knows, rehearsal, num_proposed)
    return policy, costs.record


def _keep_memory(device: Device) -> None:
    """Exempt existing objects from garbage collection, since a full pass over torch's objects takes a hundred steps.

    They live as long as the engine, so the collector would find nothing.
    """
    if device.name == "cuda":
        gc.collect()
        gc.freeze()


def release_memory(device: Device) -> None:
    """Once an engine is dropped: collect its reference cycles and return the cached memory to the device."""
    if device.name == "cuda":
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


# Of speech models; requests that transcribe have them, others do not.
_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")


def sampling_defaults(generation: dict[str, Any]) -> SamplingParams:
    """The sampling part of a generation_config.json. Without do_sample the default is greedy."""
    fields = Fields.from_dict(generation, "generation_config.json")
    known = {name: fields[name] for name in MODEL_DEFAULTS if fields.has(name)}
    if not fields.flag("do_sample", True):
        known = {"temperature": 0.0, "repetition_penalty": known.get("repetition_penalty")}
    known |= {name: tuple(fields.integers(name)) for name in _SUPPRESSED if fields.has(name)}
    try:
        return SamplingParams.from_dict(known)
    except RequestError as error:
        raise ModelError(f"{fields.source}: {error}") from error


def _eos_ids(
    generation: dict[str, Any], hf_config: dict[str, Any], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """End-of-sequence ids. The generation config comes first, since chat models end on more than one token."""
    found: list[int] = []
    for values, name in ((generation, "generation_config.json"), (hf_config, "config.json")):
        fields = Fields.from_dict(values, name)
        if isinstance(fields.get("eos_token_id"), list):
            found = fields.integers("eos_token_id", high=vocab_size - 1)
        elif fields.has("eos_token_id"):
            found = [fields.integer("eos_token_id", low=0, high=vocab_size - 1)]
        if found:
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None and tokenizer.eos_token_id < vocab_size:
        found = [*found, tokenizer.eos_token_id]
    return tuple(dict.fromkeys(found))
