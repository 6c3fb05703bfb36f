"""Configuration: frozen dataclasses, one per component, and ``resolve``, which runs once.

The only reader of the environment. After ``resolve`` nothing is guessed or patched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slipstream.errors import ConfigError, nearest
from slipstream.speculative_config import SpeculativeConfig, read_speculative

GRAPH_MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
DTypeName = Literal["float64", "float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

GIB = 1024**3


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


def sync_check_enabled() -> bool:
    """$SLIPSTREAM_SYNC_CHECK: on a GPU, raise where the host would wait for it outside of the places for that."""
    return _flag("SLIPSTREAM_SYNC_CHECK")


def trace_path() -> Path | None:
    """$SLIPSTREAM_TRACE: where to write a trace of host and device, for Perfetto or chrome://tracing."""
    given = os.environ.get("SLIPSTREAM_TRACE", "").strip()
    return Path(given).expanduser() if given else None


# --- what the user says ---------------------------------------------------------------------------


def _option(default: Any, text: str) -> Any:
    """An engine option; the text is its documentation, shown by the command line as well."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineOptions:
    """What a user may set, under the names vLLM's users know. ``None`` means: choose for this model and machine."""

    model: str = _option("smollm2-135m", "Model: a folder, a .gguf file, a hub id or an alias (`slipstream models`).")
    device: str = _option(
        "auto", "Device to run on: auto, cuda, cpu, or sim (a simulated GPU that checks the engine; slow)."
    )
    dtype: str = _option("auto", "Data type of weights and cache: auto, float32, bfloat16, float16 or float64.")
    max_model_len: int | None = _option(None, "Longest prompt plus output, in tokens; the model's own limit if unset.")
    max_num_seqs: int | None = _option(None, "Most requests that run at the same time.")
    max_num_batched_tokens: int | None = _option(None, "Most tokens in one step, prefill and decode together.")
    long_prefill_token_threshold: int | None = _option(None, "Most prompt tokens of one request in one step.")
    mixed_prefill_tokens: int | None = _option(
        None, "Most prompt tokens in a step in which others decode; chosen so that they wait about 20 ms if unset."
    )
    block_size: int = _option(16, "Tokens in one KV cache page; a power of two.")
    kv_cache_memory_bytes: int | None = _option(None, "Memory for the KV cache, in bytes.")
    gpu_memory_utilization: float = _option(0.9, "Share of the GPU's memory for weights, cache and everything else.")
    num_gpu_blocks_override: int | None = _option(None, "Number of KV cache pages, instead of a size in bytes.")
    attention_backend: str = _option(
        "auto", "Attention backend: auto, triton (GPU), cpu or reference (the definition)."
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
    speculate: str | None = _option(
        None, "Draft tokens ahead by this method: ngram, draft_model, eagle, eagle3 or mtp."
    )
    k: int | None = _option(
        None, "Tokens to draft ahead in every step; if unset, as many as pay, which may be none, measured as it runs."
    )
    draft_model: str | None = _option(
        None, "Checkpoint that drafts: a smaller model with the same vocabulary, or an EAGLE head of this model."
    )
    speculative_config: Mapping[str, Any] | None = _option(
        None,
        'Speculation in vLLM\'s spelling, as JSON: {"method": "ngram", "num_speculative_tokens": 4}. Also '
        "adaptive, prompt_lookup_min, prompt_lookup_max, model, verify (match, rejection, synthetic) and "
        "acceptance_rates.",
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
    dtype: str = "float32"  # as stored in the checkpoint

    def window(self, layer_idx: int) -> int:
        return self.windows[layer_idx] if self.windows else 0

    def has_experts(self, layer_idx: int) -> bool:
        return self.experts is not None and layer_idx in self.experts.layer_ids

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


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
    # Pages taken beyond the need while the pool is well filled, so that most decode steps change no page table.
    lookahead_pages: int = 4
    num_drafts: int = 0  # most drafts a step checks for one request
    # Slots of the cache beyond a step's own tokens that drafting after it may write.
    num_draft_slots: int = 0
    # Whether the drafter keeps keys of its own in the pages. A page without them is of no use to a request that drafts.
    drafts_in_pages: bool = False
    # Whether its keys at a slot depend on the token behind. A page is then known by its tokens and the one behind them.
    drafts_look_ahead: bool = False


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
    draft_model: ModelConfig | None = None
    num_draft_modules: int = 1  # that take turns at drafting

    @property
    def num_drafts(self) -> int:
        return self.scheduler.num_drafts

    @property
    def cache_bytes(self) -> int:
        """Of keys and values, the draft model's included."""
        of_a_token = self.model.kv_bytes_per_token(self.dtype)
        if self.draft_model is not None:
            of_a_token += draft_bytes_per_token(self.draft_model, self.num_draft_modules, self.dtype)
        return self.cache.num_pages * self.cache.page_size * of_a_token


class DraftModel(NamedTuple):
    """A second checkpoint, that drafts for the first."""

    config: ModelConfig
    num_params: int = 0
    num_modules: int = 1  # of a head, one for each draft until their turn comes again


def draft_bytes_per_token(model: ModelConfig, num_modules: int, dtype: str) -> int:
    """Keys and values, and what each module but the last leaves for the next one."""
    return model.kv_bytes_per_token(dtype) + (num_modules - 1) * model.hidden_size * DTYPE_BYTES[dtype]


def resolve(
    options: EngineOptions,
    hardware: Hardware,
    model: ModelConfig,
    num_params: int = 0,
    draft: DraftModel | None = None,
) -> EngineConfig:
    """Turn wishes, machine and model into the one configuration the engine runs with."""
    _check_choice("device", options.device, ("auto", "cpu", "cuda", "sim"))
    _check_choice("attention_backend", options.attention_backend, ("auto", "cpu", "triton", "reference"))
    _check_choice("cudagraph_mode", options.cudagraph_mode, ("auto", *GRAPH_MODES))
    _check_choice("dtype", options.dtype, ("auto", *DTYPE_BYTES))
    dtype = _resolve_dtype(options.dtype, hardware, model)
    has_gpu = hardware.device == "cuda"
    max_model_len = _positive("max_model_len", options.max_model_len, model.max_position)
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the model's context of {model.max_position}; lower it"
        )
    if draft is not None and draft.config.max_position < max_model_len:
        raise ConfigError(
            f"the draft model's context of {draft.config.max_position} is shorter than the target's {max_model_len}; "
            f"set max_model_len to at most {draft.config.max_position} or use another draft model"
        )
    max_num_seqs = _positive("max_num_seqs", options.max_num_seqs, 256 if has_gpu else 32)
    speculative = _fitting_speculation(options, max_num_seqs)
    num_drafts = 0 if speculative is None else speculative.num_drafts
    usual = max(8192 if has_gpu else 512, max_num_seqs * (1 + num_drafts))
    budget = _positive("max_num_batched_tokens", options.max_num_batched_tokens, usual)
    if budget < max_num_seqs * (1 + num_drafts):
        each = f"a token and {num_drafts} drafts a step" if num_drafts else "a token a step"
        times = f" x {1 + num_drafts}" if num_drafts else ""
        raise ConfigError(
            f"max_num_batched_tokens {budget} is below max_num_seqs {max_num_seqs}{times}; "
            f"every running request needs {each}"
        )
    if options.block_size < 1 or options.block_size & (options.block_size - 1):
        raise ConfigError(f"block_size must be a power of two, not {options.block_size}")
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk=_positive("long_prefill_token_threshold", options.long_prefill_token_threshold, budget),
        max_model_len=max_model_len,
        mixed_prefill_tokens=_positive(
            "mixed_prefill_tokens",
            options.mixed_prefill_tokens,
            _mixed_prefill(num_params, budget) if has_gpu else budget,
        ),
        prefix_caching=options.enable_prefix_caching,
        num_drafts=num_drafts,
        num_draft_slots=num_drafts if draft is not None else 0,
        drafts_in_pages=draft is not None,
        drafts_look_ahead=speculative is not None and speculative.takes_hidden_states,
    )
    return EngineConfig(
        model=model,
        cache=_resolve_cache(options, hardware, model, dtype, scheduler, num_params, draft),
        scheduler=scheduler,
        device=hardware.device,
        dtype=dtype,
        attention_backend=_resolve_backend(options.attention_backend, hardware),
        steps_in_flight=_positive("steps_in_flight", options.steps_in_flight, 1 if hardware.device == "cpu" else 2),
        seed=options.seed,
        cudagraph_mode=_resolve_graph_mode(options.cudagraph_mode, hardware),
        cudagraph_sizes=_resolve_graph_sizes(options.cudagraph_capture_sizes, budget, max_num_seqs),
        poison=_flag("SLIPSTREAM_POISON"),
        speculative=speculative,
        draft_model=None if draft is None else draft.config,
        num_draft_modules=1 if draft is None else min(draft.num_modules, num_drafts),
    )


def _fitting_speculation(options: EngineOptions, max_num_seqs: int) -> SpeculativeConfig | None:
    """A draft length that adapts stays within the tokens that a step may have."""
    speculative = speculation_of(options)
    if speculative is None or options.max_num_batched_tokens is None:
        return speculative
    return speculative.lowered(options.max_num_batched_tokens // max_num_seqs - 1)


def speculation_of(options: EngineOptions) -> SpeculativeConfig | None:
    """What the options say of drafts, checked."""
    return read_speculative(options.speculative_config, options.speculate, options.k, options.draft_model)


def _resolve_dtype(wish: str, hardware: Hardware, model: ModelConfig) -> DTypeName:
    if hardware.device == "cuda":
        if wish == "float64":
            raise ConfigError("dtype float64 runs on a CPU only; use bfloat16, float16 or float32")
        # A checkpoint in float16 may have weights that bfloat16 would round; every other one fits.
        return ("float16" if model.dtype == "float16" else "bfloat16") if wish == "auto" else wish  # type: ignore[return-value]
    if wish == "auto":
        return "float32"  # the safe and, without matrix units, the fast choice on a CPU
    if not hardware.dtype_works:
        raise ConfigError(f"{wish} matrix products crash on this CPU; use dtype float32")
    return wish  # type: ignore[return-value]


def _resolve_backend(wish: str, hardware: Hardware) -> str:
    usable = {"cpu": ("cpu", "reference"), "sim": ("reference", "triton"), "cuda": ("triton",)}[hardware.device]
    if wish not in ("auto", *usable):
        raise ConfigError(f"attention_backend {wish} does not run on {hardware.device}; use {' or '.join(usable)}")
    return usable[0] if wish == "auto" else wish


def _resolve_graph_mode(wish: str, hardware: Hardware) -> str:
    if hardware.device != "cpu":
        return "full" if wish == "auto" else wish
    if wish not in ("auto", "none"):
        raise ConfigError(f"cudagraph_mode {wish} needs a GPU; a CPU has no graphs, use auto or none")
    return "none"


def _resolve_graph_sizes(wish: tuple[int, ...] | None, max_num_tokens: int, max_num_seqs: int) -> tuple[int, ...]:
    """Close together where batches are small, because padding is a share of the batch."""
    # The full batch has a size of its own; beyond 512 there are decodes only.
    large = range(544, max_num_seqs + 1, 32)
    sizes: Iterable[int] = wish or (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *large, max_num_seqs)
    for size in sizes:
        _positive("cudagraph_capture_sizes", size, 1)
    return tuple(sorted({size for size in sizes if size <= max_num_tokens}))


def _mixed_prefill(num_params: int, budget: int) -> int:
    """Tokens that a Hopper GPU computes in about 20 ms, at two operations a parameter and 600 TFLOP/s."""
    tokens = int(6e12 / max(1, num_params))
    return min(budget, max(256, 1 << (tokens.bit_length() - 1) if tokens else 0))


def _resolve_cache(
    options: EngineOptions,
    hardware: Hardware,
    model: ModelConfig,
    dtype: str,
    scheduler: SchedulerConfig,
    num_params: int,
    draft: DraftModel | None,
) -> CacheConfig:
    token_bytes = model.kv_bytes_per_token(dtype)
    if draft is not None:
        num_modules = min(draft.num_modules, scheduler.num_drafts)
        token_bytes += draft_bytes_per_token(draft.config, num_modules, dtype)
    page_bytes = token_bytes * options.block_size
    if options.num_gpu_blocks_override is not None:
        num_pages = _positive("num_gpu_blocks_override", options.num_gpu_blocks_override, 0)
    else:
        wish = min(hardware.free_memory_bytes // 4, 4 * GIB)
        if hardware.device == "cuda" and options.kv_cache_memory_bytes is None:
            wish = _gpu_cache_bytes(options, hardware, model, dtype, scheduler, num_params, draft)
        memory = _positive("kv_cache_memory_bytes", options.kv_cache_memory_bytes, wish)
        pages_per_request = -(-scheduler.max_model_len // options.block_size)
        num_pages = min(memory // page_bytes, scheduler.max_num_seqs * pages_per_request)
        if num_pages < 1:
            raise ConfigError(
                f"the KV cache of {memory} bytes holds no page of {page_bytes} bytes; raise kv_cache_memory_bytes"
            )
    return CacheConfig(page_size=options.block_size, num_pages=num_pages + 1)


def _gpu_cache_bytes(
    options: EngineOptions,
    hardware: Hardware,
    model: ModelConfig,
    dtype: str,
    scheduler: SchedulerConfig,
    num_params: int,
    draft: DraftModel | None,
) -> int:
    """What is left of the share of the GPU's memory that the engine may use, others' use of it subtracted."""
    share = options.gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}")
    others = hardware.total_memory_bytes - hardware.free_memory_bytes
    weights = (num_params + (draft.num_params if draft else 0)) * DTYPE_BYTES[dtype]
    working = working_memory_bytes(model, dtype, scheduler)
    if draft is not None:
        # Its activations, and the logits of all drafts where they are kept.
        working += working_memory_bytes(draft.config, dtype, scheduler) - GIB
        working += (scheduler.max_num_seqs + 1) * scheduler.num_drafts * draft.config.vocab_size * 4
    left = int(hardware.total_memory_bytes * share) - others - weights - working
    if left <= 0:
        raise ConfigError(
            f"no GPU memory is left for the KV cache: of {hardware.total_memory_bytes / GIB:.1f} GiB times "
            f"gpu_memory_utilization {share}, weights in {dtype} take {weights / GIB:.1f} GiB, "
            f"work {working / GIB:.1f} and other processes {others / GIB:.1f}; raise gpu_memory_utilization, lower "
            "max_num_batched_tokens or max_num_seqs, or use a smaller model"
        )
    return left


def working_memory_bytes(model: ModelConfig, dtype: str, scheduler: SchedulerConfig) -> int:
    """An upper bound of what a step needs beside weights and cache: activations, logits, rows, and torch's own."""
    tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    widest = 2 * model.intermediate_size
    if model.experts is not None:
        widest = max(widest, model.experts.num_experts_per_token * (3 * model.experts.intermediate_size))
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    activations = tokens * (4 * model.hidden_size + heads + 2 * widest) * DTYPE_BYTES[dtype]
    # Float32, and copies that sampling parameters make.
    logits = 6 * rows * (1 + scheduler.num_drafts) * model.vocab_size * 4
    return activations + logits + rows * scheduler.max_model_len * 8 + GIB


def _positive(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, not {value!r}")
    return value


def _check_choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} must be one of {', '.join(valid)}, not '{value}'{nearest(value, valid)}")
