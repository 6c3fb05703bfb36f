"""Which attention backend an engine uses and why, and how backends and caches are opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from slipstream.attention.backend import AttentionBackend
from slipstream.attention.backends.cpu import CpuBackend
from slipstream.attention.backends.flashinfer import FlashInferBackend
from slipstream.attention.backends.flashinfer_library import FlashInferLibrary
from slipstream.attention.backends.flashinfer_paths import (
    ExactLengths,
    Features,
    HeadShape,
    Paths,
    choose_paths,
    is_installed,
)
from slipstream.attention.backends.flex import FlexBackend
from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.backends.triton import ExactTritonBackend, TritonBackend
from slipstream.attention.grouped_query import GroupedQueryCaches
from slipstream.attention.groups import CacheGroups, LayerMemory
from slipstream.cache_spec import CacheSpec
from slipstream.config import EngineConfig, Hardware, ModelConfig
from slipstream.device.interface import Device
from slipstream.errors import ConfigError
from slipstream.kernels import native

BACKENDS = ("cpu", "triton", "flashinfer", "flex", "reference")
# By device, the choice of auto first.
_USABLE = {
    "cpu": ("cpu", "reference", "flex"),
    "cuda": ("triton", "flashinfer", "flex"),
    "sim": ("reference", "triton", "flex"),
}
# Backends with a choice of kernels for prompts.
PROMPT_KERNELS = ("triton",)
# Backends with cascade attention.
CASCADING = ("triton",)
# Backends whose drafters may use non-causal attention: with FlashInfer a drafter uses Triton.
NON_CAUSAL = ("cpu", "triton", "flashinfer", "reference")
# Backends that attend to the output of an encoder: with FlashInfer those layers use Triton.
ATTENDS_ENCODED = NON_CAUSAL
# Backends that read keys and values of another type than the queries'.
READS_SMALLER_KEYS = ("cpu", "reference")
# Backends that capture steps with prompts in one graph, drafting included.
RECORDS_PROMPTS = ("triton",)
# Backends with attention whose result for a token depends on that token and its keys alone, to the bit.
KEEPS_EXACT = ("cpu", "triton")
_WHY = {
    "cpu": "batched, in C where there is a compiler; fastest on a CPU",
    "cuda": "one launch a layer from projection to result, captured in every graph; lengths stay on the device",
    "sim": "the definition: speed does not matter on a simulated device",
}


class Choice(NamedTuple):
    name: str
    reason: str


def choose_backend(asked: str, device: str, exact: bool = False) -> Choice:
    """The backend for an option and a kind of device. Auto never picks one that must drain the device."""
    usable: tuple[str, ...] = _USABLE[device]
    if exact:
        usable = tuple(name for name in usable if name in KEEPS_EXACT)
        if asked in _USABLE[device] and asked not in usable:
            raise ConfigError(f"exact is not possible with attention_backend {asked}; use {' or '.join(usable)}")
    if asked == "auto":
        return Choice(usable[0], "the one with exact results" if exact else _WHY[device])
    if asked not in usable:
        raise ConfigError(f"attention_backend {asked} does not run on {device}; use {' or '.join(usable)}")
    return Choice(asked, "asked for")


def flashinfer_paths(model: ModelConfig, hardware: Hardware, dtype: str, page_size: int, num_drafts: int) -> Paths:
    shape = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim, page_size, dtype)
    features = Features(query_len=1 + num_drafts, window=max(model.windows, default=0))
    return choose_paths(hardware.capability, shape, features, is_installed())


def exact_lengths(
    name: str, model: ModelConfig, hardware: Hardware, dtype: str, page_size: int, num_drafts: int
) -> ExactLengths:
    """The steps for which a backend plans on the host; refuses what it does not support."""
    if name != "flashinfer":
        return "never"
    return flashinfer_paths(model, hardware, dtype, page_size, num_drafts).check().exact_lengths


def open_caches(
    config: EngineConfig,
    model: ModelConfig,
    device: Device,
    for_drafter: bool = False,
    attention: AttentionBackend | None = None,  # instead of the configuration's
) -> CacheGroups:
    """Memory and backends for all layers of a network: the target's, or a drafter's with its own caches."""

    def open_grouped_query(spec: CacheSpec, memory: Mapping[int, LayerMemory]) -> GroupedQueryCaches:
        # A backend that plans with the lengths of texts would do so again for other lengths in every step.
        has_gaps = for_drafter or spec.indexed_by != "text"
        own = attention or make_backend(config, model, device, has_gaps)
        return GroupedQueryCaches(own, {idx: tensors[0] for idx, tensors in memory.items()})

    specs = model.with_keys_in(config.model.keys_in).cache_specs  # a drafter's model was read earlier
    return CacheGroups.open(specs, config, device.torch_device, open_grouped_query)


def make_backend(
    config: EngineConfig, model: ModelConfig, device: Device, for_drafter: bool = False
) -> AttentionBackend:
    """For the target, or for a drafter with its own keys."""
    name = config.attention_backend
    if name == "reference":
        return ReferenceBackend()
    if name == "flex":
        # Without a compiler, scores are computed for every gathered key: small blocks gather fewer.
        return FlexBackend(config.cache.page_size, key_block=128 if config.device == "cuda" else 16)
    if name == "flashinfer" and not for_drafter:
        hardware = device.hardware(config.dtype)
        paths = flashinfer_paths(model, hardware, config.dtype, config.cache.page_size, config.num_drafts)
        lengths = () if config.speculative is None else config.speculative.lengths
        decode_lens = {1, *(1 + k for k in lengths)}
        library, limits = FlashInferLibrary(paths.check(), device.torch_device), config.scheduler
        sizes = (config.cache.page_size, limits.max_num_seqs, decode_lens)
        return FlashInferBackend(paths, library, *sizes, device.torch_device)
    is_exact = config.exact and not for_drafter
    if name in ("triton", "flashinfer"):  # FlashInfer reads every slot of a sequence; a drafter's keys have gaps
        if is_exact:
            return ExactTritonBackend()
        return TritonBackend(config.mixed_attention, config.prompt_kernel)
    in_place = config.dtype == "float32" and native.library() is not None
    return CpuBackend(config.cache.page_size, in_place, model.head_dim, is_exact)
