"""Configuration: frozen dataclasses, one per component. The only reader of the environment.

``engine/resolve.py`` derives ``EngineConfig`` from the options once; afterwards nothing is guessed or patched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slipstream.cache_spec import CacheSpec, TokenStates, page_bytes, row_bytes
from slipstream.errors import ConfigError, nearest
from slipstream.model_config import ModelConfig as ModelConfig
from slipstream.model_config import RopeConfig as RopeConfig
from slipstream.speculative_config import NO_NEEDS, Needs, SpeculativeConfig

GRAPH_MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
WEIGHT_FORMATS = ("auto", "stored", "float")
CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
DTypeName = Literal["float64", "float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

USUAL_REQUESTS = {"cuda": 256, "cpu": 32}  # default of max_num_seqs
GIB = 1024**3


def writable_folder(folder: Path, what: str, other: str) -> Path:
    """Make the folder; called before the work whose results go there, so that a wrong path costs no work."""
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
    """Where downloaded models are kept: $SLIPSTREAM_CACHE, else the user's cache folder."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream"


def debug_enabled() -> bool:
    """$SLIPSTREAM_DEBUG: show tracebacks instead of errors of one line."""
    return _flag("SLIPSTREAM_DEBUG")


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def child_environment(**defaults: str) -> dict[str, str]:
    """This process's environment for a child, with defaults for unset variables."""
    return {**defaults, **os.environ}


def poison_enabled() -> bool:
    """Overwrite every per-step buffer before each step, so that a stale read fails."""
    return _flag("SLIPSTREAM_POISON")


def triton_requested() -> bool:
    """$TRITON_INTERPRET, Triton's own variable, is set: its kernels are wanted where there is no GPU, too."""
    return "TRITON_INTERPRET" in os.environ


def sync_check_enabled() -> bool:
    """$SLIPSTREAM_SYNC_CHECK: on a GPU, raise where the host synchronises with it unintentionally."""
    return _flag("SLIPSTREAM_SYNC_CHECK")


def cpu_instructions() -> str:
    """$SLIPSTREAM_CPU_ISA: instruction set of the C kernels: native, or a smaller one: avx2, baseline."""
    return os.environ.get("SLIPSTREAM_CPU_ISA", "").strip().lower() or "native"


def activation_bits() -> int | None:
    """$SLIPSTREAM_CPU_ACTIVATION_BITS: 32, 24 or 16, for products with quantised weights on a CPU; None: auto."""
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


# --- options of the user --------------------------------------------------------------------------


def option(default: Any, text: str) -> Any:
    """A field of a settings dataclass; the text is its documentation, shown by the command line as well."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine, with vLLM's names where it has them. ``None``: chosen for this model and machine.

    Names in braces in help texts are filled in by ``speculate.options.fill_help``.
    """

    model: str = option("smollm2-135m", "Model: a folder, a .gguf file, a hub id or an alias (`slipstream models`).")
    device: str = option(
        "auto", "Device to run on: auto, cuda, cpu, or sim (a simulated GPU that checks the engine; slow)."
    )
    dtype: str = option("auto", "Data type of weights and cache: auto, float32, bfloat16, float16 or float64.")
    weight_format: str = option(
        "auto",
        "Quantised weights of a GGUF file: stored (kept as in the file; on a CPU), float (dequantised), or auto.",
    )
    max_model_len: int | None = option(None, "Maximum tokens of prompt and output; the model's limit if unset.")
    max_num_seqs: int | None = option(None, "Maximum number of running requests.")
    max_num_batched_tokens: int | None = option(None, "Maximum tokens per step, prefill and decode together.")
    long_prefill_token_threshold: int | None = option(None, "Maximum prompt tokens of one request per step.")
    mixed_prefill_tokens: int | None = option(
        None, "Maximum prompt tokens in a step that also decodes, beside what max_itl_ms allows; no limit if unset."
    )
    max_itl_ms: float | None = option(
        None,
        "Limit on the time between tokens of running requests while prompts are computed beside them, in milliseconds. "
        "Prompts are cut by the measured cost of steps. If unset, 75 ms, or longer where a shorter limit would cost "
        "more than a tenth of the throughput.",
    )
    prefer: str = option(
        "auto",
        "Steps with prompts: balance (as short as max_itl_ms says), throughput (full), or auto: balance where requests "
        "are served, and throughput in LLM, whose requests come together.",
    )
    block_size: int = option(16, "Tokens in one KV cache page; a power of two.")
    kv_cache_dtype: str = option(
        "auto",
        "Data type of keys and values in the cache: auto (the engine's), float32, float16 or bfloat16. With dtype "
        "float32 on a CPU the last two halve the cache; anywhere else only the engine's own type is possible.",
    )
    kv_cache_memory_bytes: int | None = option(None, "Memory for the KV cache, in bytes.")
    gpu_memory_utilization: float = option(0.9, "Fraction of the GPU's memory for weights, cache and everything else.")
    num_gpu_blocks_override: int | None = option(None, "Number of KV cache pages, instead of a size in bytes.")
    attention_backend: str = option(
        "auto", "Attention backend: auto, triton, flashinfer or flex (GPU), cpu, or reference (the definition)."
    )
    mixed_attention: str = option(
        "together",
        "Attention of steps with prompts and decodes, with the backend triton: together (all by the kernel of prompts) "
        "or apart (each by its own, keys of decodes split among programs; not measured yet).",
    )
    prompt_kernel: str = option(
        "pointers",
        "Kernel of attention over prompts, with the backend triton: pointers, or tma (Hopper and newer; not measured "
        "yet, so never chosen by itself).",
    )
    cascade: str = option(
        "auto", "Cascade attention over a prefix common to a batch: auto (where it pays), always or never."
    )
    steps_in_flight: int | None = option(
        None, "Steps launched before the oldest is collected; 1 waits for each, 2 or more run ahead."
    )
    cudagraph_mode: str = option(
        "auto",
        "CUDA graphs: auto, none, piecewise, full, full_decode_only or full_and_piecewise.",
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = option(None, "Numbers of tokens to capture graphs for.")
    enable_prefix_caching: bool = option(True, "Reuse keys and values of common prefixes.")
    speculate: str | None = option(None, "Method of speculative decoding: {methods}; none disables it.")
    k: int | None = option(None, "Draft length; if unset it adapts to measured acceptance and cost, down to none.")
    draft_model: str | None = option(
        None, "Checkpoint of the drafter: a smaller model with the same vocabulary, or a draft head of this model."
    )
    speculative_config: Mapping[str, Any] | None = option(
        None,
        'Speculation in vLLM\'s format, as JSON: {"method": "{a method}", "num_speculative_tokens": 4}. Also '
        "adaptive, {keys}, model, verify (match, rejection, synthetic) and acceptance_rates.",
    )
    exact: bool = option(
        False,
        "The same tokens and log probabilities, to the bit, whatever the batch, the cache and the drafter: see "
        "docs/exact.md.",
    )
    seed: int | None = option(None, "Seed for the seeds of requests that have none; different in every run if unset.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineOptions:
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"unknown option '{name}'{nearest(name, known)}")
        return cls(**values)


# --- the machine and the model -----------------------------------------------------------


@dataclass(frozen=True)
class Hardware:
    """The machine as ``resolve`` sees it; measured by ``slipstream.device``."""

    device: Literal["cpu", "cuda", "sim"]
    free_memory_bytes: int
    dtype_works: bool  # false if the CPU advertises the type's instructions but faults on them
    total_memory_bytes: int = 0  # of a GPU
    capability: tuple[int, int] | None = None  # of a GPU
    name: str = ""  # of the processor that computes


# --- configuration of the components ----------------------------------------------------------------------


@dataclass(frozen=True)
class CacheConfig:
    page_size: int
    num_pages: int  # the null page, number 0, included

    @property
    def num_usable_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size

    def num_tokens_beside(self, num_encoder_entries: int) -> int:
        """Tokens that fit beside the output of a request's encoder, which has pages of its own."""
        return self.num_usable_tokens - -(-num_encoder_entries // self.page_size) * self.page_size


class StepRates(NamedTuple):
    """What a step costs, in seconds: the sum of these, each times how much of it the step has."""

    step: float = 1e-3  # any step: reading the weights, launching
    token: float = 1e-6
    cached_key: float = 1e-9  # a key that a decoding request reads
    pair: float = 1e-12  # a key that a prompt token attends to
    draft: float = 1e-5  # a draft token proposed for every request


_USUAL_RATES = StepRates()


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_model_len: int
    mixed_prefill_tokens: int = 1 << 30  # of all prompts together, in a step that also decodes
    # Limit on the time of a step that also decodes; None: chosen from the measured cost of steps.
    max_itl_s: float | None = None
    # Whether steps with prompts are limited in time. Otherwise they are filled, oldest prompts first.
    limits_time: bool = False
    step_rates: StepRates = _USUAL_RATES  # before any step is measured
    # A prompt is computed in one step or not at all: prompts wait until a step has room for all their tokens.
    whole_prompts: bool = False
    prefix_caching: bool = True
    # Why prefix caching is off although it was enabled; empty if it is not refused.
    prefix_caching_refused: str = ""
    # Pages reserved ahead while the pool has enough, so that most decode steps change no page table.
    lookahead_pages: int = 4
    num_drafts: int = 0  # maximum drafts that a step verifies for one request
    # Cache slots after a step's own tokens that drafting may write.
    num_draft_slots: int = 0
    # Of the drafter with this configuration: it follows only if the draft length adapts.
    needs: Needs = NO_NEEDS
    # Steps whose attention needs exact lengths on the host: launched once all earlier steps are collected.
    exact_lengths: Literal["never", "prefill", "always"] = "never"
    # Cascade attention is used if it saves reading the keys of this many tokens; None: never.
    least_saved: int | None = None
    # Drafts proposed after a step with prompts, the number that its graphs are captured for; None: no limit.
    drafts_beside_prompts: int | None = None

    @property
    def max_staged_tokens(self) -> int:
        """Of the requests that one step admits: as many as a step computes, and any one request."""
        return max(self.max_model_len, self.max_num_batched_tokens)


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
    # Overwrite every per-step buffer before each step, so that a stale read fails.
    poison: bool
    # Steps of so many tokens or more that no graph holds run their forward pass in two halves; None: in one.
    split_steps_from: int | None = None
    speculative: SpeculativeConfig | None = None
    draft_model: ModelConfig | None = None  # the drafter's network
    num_draft_modules: int = 1  # used in turn for successive drafts
    mixed_attention: str = "together"  # or apart
    prompt_kernel: str = "pointers"  # or tma
    weight_formats: str = ""  # of the target, as users know them: "bfloat16", "Q4_K, Q6_K"
    exact: bool = False  # tokens and log probabilities of a request depend on the request alone, to the bit
    processor: str = ""  # its name: numbers may differ in their last bits on another one

    @property
    def num_drafts(self) -> int:
        return self.scheduler.num_drafts

    def for_clients(self) -> EngineConfig:
        """Without cache specs and weight formats: messages cannot encode every kind, and clients need none."""

        def reduce(model: ModelConfig) -> ModelConfig:
            return replace(model, layer_caches=(), quantization=None)

        draft = None if self.draft_model is None else reduce(self.draft_model)
        return replace(self, model=reduce(self.model), draft_model=draft)

    @property
    def cache_bytes(self) -> int:
        """Memory of all caches, the drafter's included."""
        specs = self.model.cache_specs
        if self.draft_model is not None:
            specs += draft_cache_specs(self.draft_model, self.num_draft_modules)
        pages = self.cache.num_pages * page_bytes(specs, self.cache.page_size, self.dtype)
        return pages + (self.scheduler.max_num_seqs + 1) * row_bytes(specs, self.num_drafts, self.dtype)


class NetworkSize(NamedTuple):
    """The size of a network, measured before it has memory."""

    num_params: int = 0  # as in the checkpoint, however they are stored
    num_bytes: int = 0  # of all weights in their final layout
    formats: str = ""  # of the weights that products read, most frequent first
    inexact: str = ""  # what of it depends on the batch in its last bits: formats of weights, layers


UNMEASURED = NetworkSize()


class DraftModel(NamedTuple):
    """The checkpoint of a drafter."""

    config: ModelConfig
    size: NetworkSize = UNMEASURED
    num_modules: int = 1  # of a head; draft i uses module i modulo their number
    max_drafts: int | None = None  # of a head that has places for no more


def draft_cache_specs(model: ModelConfig, num_modules: int) -> tuple[CacheSpec, ...]:
    """The caches of a drafter: its layers', and the states that each module but the last passes to the next."""
    return (*model.cache_specs, *[TokenStates(model.hidden_size)] * (num_modules - 1))
