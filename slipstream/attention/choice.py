"""Which attention backend serves an engine, why, and how it and the caches of a network are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from slipstream.attention.backend import AttentionBackend
from slipstream.attention.cpu import CpuBackend
from slipstream.attention.flashinfer import FlashInferBackend
from slipstream.attention.flashinfer_library import FlashInferLibrary
from slipstream.attention.flashinfer_paths import (
    ExactLengths,
    Features,
    HeadShape,
    Paths,
    choose_paths,
    is_installed,
)
from slipstream.attention.flex import FlexBackend
from slipstream.attention.grouped_query import GroupedQueryCaches
from slipstream.attention.groups import CacheGroups, LayerMemory
from slipstream.attention.reference import ReferenceBackend
from slipstream.attention.triton import TritonBackend
from slipstream.cache_spec import GroupedQuerySpec
from slipstream.config import EngineConfig, Hardware, ModelConfig
from slipstream.device.interface import Device
from slipstream.errors import ConfigError
from slipstream.kernels import native

BACKENDS = ("cpu", "triton", "flashinfer", "flex", "reference")
# By device, auto's choice first.
_USABLE = {
    "cpu": ("cpu", "reference", "flex"),
    "cuda": ("triton", "flashinfer", "flex"),
    "sim": ("reference", "triton", "flex"),
}
# Backends that can read pages which all requests of a step begin with once.
CASCADING = ("triton",)
# Backends whose drafters may let all query tokens of a request see each other: with FlashInfer a drafter has Triton.
NON_CAUSAL = ("cpu", "triton", "flashinfer", "reference")
# Backends that read keys and values of another type than the queries'.
READS_SMALLER_KEYS = ("cpu", "reference")
# Backends whose steps with prompts are recorded whole, drafts included.
RECORDS_PROMPTS = ("triton",)
_WHY = {
    "cpu": "batched, in C where there is a compiler; what a CPU is fastest with",
    "cuda": "one launch a layer from projection to result, recorded in every graph, lengths stay on the device",
    "sim": "the definition: on a simulated device nothing is gained by more",
}


class Choice(NamedTuple):
    name: str
    reason: str


def choose_backend(wish: str, device: str) -> Choice:
    """What serves, from what is wished and the device's kind. Auto never takes one that must drain the device."""
    usable = _USABLE[device]
    if wish == "auto":
        return Choice(usable[0], _WHY[device])
    if wish not in usable:
        raise ConfigError(f"attention_backend {wish} does not run on {device}; use {' or '.join(usable)}")
    return Choice(wish, "asked for")


def flashinfer_paths(model: ModelConfig, hardware: Hardware, dtype: str, page_size: int, num_drafts: int) -> Paths:
    shape = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim, page_size, dtype)
    features = Features(query_len=1 + num_drafts, window=max(model.windows, default=0))
    return choose_paths(hardware.capability, shape, features, is_installed())


def exact_lengths(
    name: str, model: ModelConfig, hardware: Hardware, dtype: str, page_size: int, num_drafts: int
) -> ExactLengths:
    """For which steps a backend plans on the host; refuses what it cannot do at all."""
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
    """Memory and backends for all layers of a network: the target's, or that of a drafter with caches of its own."""

    def open_grouped_query(spec: GroupedQuerySpec, memory: Mapping[int, LayerMemory]) -> GroupedQueryCaches:
        own = attention or make_backend(config, model, device, for_drafter)
        return GroupedQueryCaches(own, {idx: tensors[0] for idx, tensors in memory.items()})

    specs = model.with_keys_in(config.model.keys_in).cache_specs  # a drafter's model was read before that was settled
    return CacheGroups.open(specs, config, device.torch_device, open_grouped_query)


def make_backend(
    config: EngineConfig, model: ModelConfig, device: Device, for_drafter: bool = False
) -> AttentionBackend:
    """For the target, or for a drafter with keys of its own."""
    name = config.attention_backend
    if name == "reference":
        return ReferenceBackend()
    if name == "flex":
        # Without a compiler behind it, scores are made for every key that is gathered: small blocks gather fewer.
        return FlexBackend(config.cache.page_size, key_block=128 if config.device == "cuda" else 16)
    if name == "flashinfer" and not for_drafter:
        hardware = device.hardware(config.dtype)
        paths = flashinfer_paths(model, hardware, config.dtype, config.cache.page_size, config.num_drafts)
        lengths = () if config.speculative is None else config.speculative.lengths
        decode_lens = {1, *(1 + k for k in lengths)}
        library, limits = FlashInferLibrary(paths.check(), device.torch_device), config.scheduler
        sizes = (config.cache.page_size, limits.max_num_seqs, decode_lens)
        return FlashInferBackend(paths, library, *sizes, device.torch_device)
    if name in ("triton", "flashinfer"):  # FlashInfer reads from a sequence's first slot on; a drafter has gaps
        return TritonBackend()
    in_place = config.dtype == "float32" and native.library() is not None
    return CpuBackend(config.cache.page_size, in_place, model.head_dim)
