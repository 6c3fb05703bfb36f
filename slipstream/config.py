"""Configuration: frozen dataclasses, one per component. The only reader of the environment.

``engine/resolve.py`` makes one from the other, once; afterwards nothing is guessed or patched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slipstream.cache_spec import CacheSpec, GroupedQuerySpec, KeyValueType, TokenStates, page_bytes, row_bytes
from slipstream.errors import ConfigError, nearest
from slipstream.speculative_config import NO_NEEDS, Needs, SpeculativeConfig

GRAPH_MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
WEIGHT_FORMATS = ("auto", "stored", "float")
CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
DTypeName = Literal["float64", "float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

USUAL_REQUESTS = {"cuda": 256, "cpu": 32}  # that an engine takes at a time, if nobody says otherwise
GIB = 1024**3


def writable_folder(folder: Path, what: str, other: str) -> Path:
    """Make the folder; called before the work whose results go there, so that none is lost to a wrong path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".write-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write {what} {folder} ({reason}); choose another {other}") from error
    return folder


def cache_dir() -> Path:
    """Where fetched models live: $SLIPSTREAM_CACHE, else the user's cache folder."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream"


def debug_enabled() -> bool:
    """$SLIPSTREAM_DEBUG: show tracebacks where the command line would print one line."""
    return _flag("SLIPSTREAM_DEBUG")


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def child_environment(**defaults: str) -> dict[str, str]:
    """This process's environment for a child, with values for what the user left open."""
    return {**defaults, **os.environ}


def poison_enabled() -> bool:
    """Overwrite every per-step buffer before each step, so that a stale read shows at once."""
    return _flag("SLIPSTREAM_POISON")


def sync_check_enabled() -> bool:
    """$SLIPSTREAM_SYNC_CHECK: on a GPU, raise where the host would wait for it outside of the places for that."""
    return _flag("SLIPSTREAM_SYNC_CHECK")


def cpu_instructions() -> str:
    """$SLIPSTREAM_CPU_ISA: what the C kernels are built for; native, or less than this CPU has: avx2, baseline."""
    return os.environ.get("SLIPSTREAM_CPU_ISA", "").strip().lower() or "native"


def activation_bits() -> int | None:
    """$SLIPSTREAM_CPU_ACTIVATION_BITS: 32, 24 or 16, before quantised weights on a CPU; None: the engine chooses."""
    given = os.environ.get("SLIPSTREAM_CPU_ACTIVATION_BITS", "").strip()
    if given in ("", "auto"):
        return None
    if given not in ("32", "24", "16"):
        raise ConfigError(f"SLIPSTREAM_CPU_ACTIVATION_BITS must be 32, 24 or 16, not '{given}'")
    return int(given)


def trace_path() -> Path | None:
    """$SLIPSTREAM_TRACE: where to write a trace of host and device, for Perfetto or chrome://tracing."""
    given = os.environ.get("SLIPSTREAM_TRACE", "").strip()
    return Path(given).expanduser() if given else None


# --- what the user says ---------------------------------------------------------------------------


def _option(default: Any, text: str) -> Any:
    """An engine option; the text is its documentation, shown by the command line as well.

    Names in braces stand for what the registry of drafters says: see ``speculate.options.fill_help``.
    """
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineOptions:
    """What a user may set, under the names vLLM's users know. ``None`` means: choose for this model and machine."""

    model: str = _option("smollm2-135m", "Model: a folder, a .gguf file, a hub id or an alias (`slipstream models`).")
    device: str = _option(
        "auto", "Device to run on: auto, cuda, cpu, or sim (a simulated GPU that checks the engine; slow)."
    )
    dtype: str = _option("auto", "Data type of weights and cache: auto, float32, bfloat16, float16 or float64.")
    weight_format: str = _option(
        "auto",
        "Quantised weights of a GGUF file: stored (kept as in the file; on a CPU), float (dequantised), or auto.",
    )
    max_model_len: int | None = _option(None, "Longest prompt plus output, in tokens; the model's own limit if unset.")
    max_num_seqs: int | None = _option(None, "Most requests that run at the same time.")
    max_num_batched_tokens: int | None = _option(None, "Most tokens in one step, prefill and decode together.")
    long_prefill_token_threshold: int | None = _option(None, "Most prompt tokens of one request in one step.")
    mixed_prefill_tokens: int | None = _option(
        None, "Most prompt tokens in a step in which others decode; chosen so that they wait about 20 ms if unset."
    )
    block_size: int = _option(16, "Tokens in one KV cache page; a power of two.")
    kv_cache_dtype: str = _option(
        "auto",
        "Data type of keys and values in the cache: auto (the engine's), float32, float16 or bfloat16. With dtype "
        "float32 on a CPU the last two halve the cache; anywhere else only the engine's own type is possible.",
    )
    kv_cache_memory_bytes: int | None = _option(None, "Memory for the KV cache, in bytes.")
    gpu_memory_utilization: float = _option(0.9, "Share of the GPU's memory for weights, cache and everything else.")
    num_gpu_blocks_override: int | None = _option(None, "Number of KV cache pages, instead of a size in bytes.")
    attention_backend: str = _option(
        "auto", "Attention backend: auto, triton, flashinfer or flex (GPU), cpu, or reference (the definition)."
    )
    cascade: str = _option(
        "auto", "Read pages that all requests of a step begin with once: auto (where it pays), always or never."
    )
    steps_in_flight: int | None = _option(
        None, "Most steps launched and not yet read; 1 waits for each, 2 or more run ahead."
    )
    cudagraph_mode: str = _option(
        "auto",
        "What runs as a recorded graph: auto, none, piecewise, full, full_decode_only or full_and_piecewise.",
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = _option(None, "Padded numbers of tokens to record graphs for.")
    enable_prefix_caching: bool = _option(True, "Keep keys and values for prompts that begin alike.")
    speculate: str | None = _option(None, "Draft tokens ahead by this method: {methods}; none drafts nothing.")
    k: int | None = _option(
        None, "Tokens to draft ahead in every step; if unset, as many as pay, which may be none, measured as it runs."
    )
    draft_model: str | None = _option(
        None, "Checkpoint that drafts: a smaller model with the same vocabulary, or a draft head of this model."
    )
    speculative_config: Mapping[str, Any] | None = _option(
        None,
        'Speculation in vLLM\'s spelling, as JSON: {"method": "{a method}", "num_speculative_tokens": 4}. Also '
        "adaptive, {keys}, model, verify (match, rejection, synthetic) and acceptance_rates.",
    )
    seed: int | None = _option(
        None, "Makes the seeds of requests that name none repeatable; different in every run if unset."
    )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineOptions:
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"unknown option '{name}'{nearest(name, known)}")
        return cls(**values)


# --- what the machine and the model are -----------------------------------------------------------


@dataclass(frozen=True)
class Hardware:
    """What ``resolve`` needs to know of the machine; measured by ``slipstream.device``."""

    device: Literal["cpu", "cuda", "sim"]
    free_memory_bytes: int
    dtype_works: bool  # false where the wished type's instructions are advertised but fault
    total_memory_bytes: int = 0  # of a GPU
    capability: tuple[int, int] | None = None  # of a GPU


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, rotated size, and how the frequencies are scaled for long contexts."""

    theta: float = 10000.0
    rotary_dim: int = 0
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # How much longer rotated vectors become; attention over long contexts stays sharp by it.
    attention_factor: float = 1.0
    # yarn: waves that turn more often than the first within the original context are kept, less than the second scaled.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # longrope: divisors of the frequencies, within the original context and beyond it.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # Per-frequency divisors as GGUF files store them; they stand for any scaling.
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward layers made of experts, a few of which work on each token."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalise: bool  # whether the weights of a token's experts sum to one
    layer_ids: tuple[int, ...]  # the other layers have one dense feed-forward
    shared_size: int = 0  # of an expert that works on every token beside the chosen ones, behind a gate; 0: none


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, whatever format it came in."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of the scores; 1 / sqrt(head_dim) if unset
    windows: tuple[int, ...] = ()  # per layer, how many positions a token sees, 0 for all; empty: all in every layer
    window_rope: RopeConfig | None = None  # of layers with a window, where it differs from the others'
    experts: ExpertsConfig | None = None
    attention_gate: bool = False  # whether a head's result is multiplied by the sigmoid of a gate of its own
    # What each layer keeps of requests; empty: keys and values of grouped-query attention, in all of them.
    layer_caches: tuple[CacheSpec, ...] = ()
    keys_in: KeyValueType = "model"  # the type of keys and values in the cache
    dtype: str = "float32"  # as stored in the checkpoint
    # How the checkpoint's weights are stored, in its own words; None: as numbers of that type.
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)

    def window(self, layer_idx: int) -> int:
        return self.windows[layer_idx] if self.windows else 0

    def has_experts(self, layer_idx: int) -> bool:
        return self.experts is not None and layer_idx in self.experts.layer_ids

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps of requests."""
        return self.layer_caches or (self.keys_and_values,) * self.num_layers

    @property
    def keys_and_values(self) -> GroupedQuerySpec:
        """What a layer with grouped-query attention keeps."""
        return GroupedQuerySpec(self.num_kv_heads, self.head_dim, self.keys_in)

    def with_keys_in(self, dtype: KeyValueType) -> ModelConfig:
        """The same with keys and values of another type in the cache."""
        return replace(self, keys_in=dtype, layer_caches=tuple(spec.with_keys_in(dtype) for spec in self.layer_caches))

    @property
    def is_plain(self) -> bool:
        """Whether all layers have grouped-query attention, and nothing is between it and the product after it."""
        return set(self.cache_specs) == {self.keys_and_values} and not self.attention_gate

    @property
    def num_attention_layers(self) -> int:
        """Of grouped-query attention."""
        return sum(isinstance(spec, GroupedQuerySpec) for spec in self.cache_specs)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Of a token in the pages of all layers."""
        return page_bytes(self.cache_specs, 1, dtype)


# --- what the components get ----------------------------------------------------------------------


@dataclass(frozen=True)
class CacheConfig:
    page_size: int
    num_pages: int  # the null page, number 0, included

    @property
    def num_usable_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_model_len: int
    mixed_prefill_tokens: int = 1 << 30  # of all prompts, in a step that decodes as well
    prefix_caching: bool = True
    # Why pages are not shared although that was asked for; empty where nothing was refused.
    prefix_caching_refused: str = ""
    # Pages taken beyond the need while the pool is well filled, so that most decode steps change no page table.
    lookahead_pages: int = 4
    num_drafts: int = 0  # most drafts a step checks for one request
    # Slots of the cache beyond a step's own tokens that drafting after it may write.
    num_draft_slots: int = 0
    # Of the drafter, as it runs: it follows only where the number of drafts adapts.
    needs: Needs = NO_NEEDS
    # Steps that attention must know true lengths for: they are launched when every earlier one is collected.
    exact_lengths: Literal["never", "prefill", "always"] = "never"
    # Pages that all requests of a step begin with are read once if that spares the keys of so many tokens; None: never.
    least_saved: int | None = None
    # How many drafts follow a step with prompts, if any: for so many there is a graph. None: as many as anywhere.
    drafts_beside_prompts: int | None = None


@dataclass(frozen=True)
class EngineConfig:
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: str
    dtype: DTypeName
    attention_backend: str
    steps_in_flight: int
    seed: int | None
    cudagraph_mode: str
    cudagraph_sizes: tuple[int, ...]
    # Overwrite every per-step buffer before each step, so that a stale read shows at once.
    poison: bool
    speculative: SpeculativeConfig | None = None
    draft_model: ModelConfig | None = None  # the drafter's network
    num_draft_modules: int = 1  # that take turns at drafting
    weight_formats: str = ""  # of the target, as users know them: "bfloat16", "Q4_K, Q6_K"

    @property
    def num_drafts(self) -> int:
        return self.scheduler.num_drafts

    def for_clients(self) -> EngineConfig:
        """Without what layers keep and how weights are stored: messages cannot know all kinds, and no client asks."""

        def reduce(model: ModelConfig) -> ModelConfig:
            return replace(model, layer_caches=(), quantization=None)

        draft = None if self.draft_model is None else reduce(self.draft_model)
        return replace(self, model=reduce(self.model), draft_model=draft)

    @property
    def cache_bytes(self) -> int:
        """Of all that is kept of requests, the drafter's included."""
        specs = self.model.cache_specs
        if self.draft_model is not None:
            specs += draft_cache_specs(self.draft_model, self.num_draft_modules)
        pages = self.cache.num_pages * page_bytes(specs, self.cache.page_size, self.dtype)
        return pages + (self.scheduler.max_num_seqs + 1) * row_bytes(specs, self.num_drafts, self.dtype)


class NetworkSize(NamedTuple):
    """What a network is made of, measured before it has memory."""

    num_params: int = 0  # numbers that the checkpoint says, however they are stored
    num_bytes: int = 0  # of all weights as they lie in memory
    formats: str = ""  # the kinds of numbers that products read, most of them first


UNMEASURED = NetworkSize()


class DraftModel(NamedTuple):
    """A second checkpoint, that drafts for the first."""

    config: ModelConfig
    size: NetworkSize = UNMEASURED
    num_modules: int = 1  # of a head, one for each draft until their turn comes again


def draft_cache_specs(model: ModelConfig, num_modules: int) -> tuple[CacheSpec, ...]:
    """What a drafter keeps: that of its layers, and what each module but the last leaves for the next one."""
    return (*model.cache_specs, *[TokenStates(model.hidden_size)] * (num_modules - 1))
