"""From options, machine and model to the one configuration that the engine runs with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slipstream.attention.choice import (
    ATTENDS_ENCODED,
    BACKENDS,
    CASCADING,
    NON_CAUSAL,
    PROMPT_KERNELS,
    RECORDS_PROMPTS,
    choose_backend,
    exact_lengths,
)
from slipstream.cache_spec import page_bytes, row_bytes
from slipstream.config import (
    DTYPE_BYTES,
    GIB,
    GRAPH_MODES,
    UNMEASURED,
    USUAL_REQUESTS,
    CacheConfig,
    DraftModel,
    DTypeName,
    EngineConfig,
    EngineOptions,
    Hardware,
    ModelConfig,
    NetworkSize,
    SchedulerConfig,
    draft_cache_specs,
    poison_enabled,
)
from slipstream.engine.cache_dtype import resolve_cache_dtype
from slipstream.engine.exactness import check_exact, describe_processor
from slipstream.engine.step_rates import expected_rates
from slipstream.errors import ConfigError, nearest
from slipstream.scheduler.cascade import least_saved
from slipstream.speculate.options import read_speculation
from slipstream.speculative_config import NO_NEEDS, Needs, SpeculativeConfig

_SMALL_TABLE_BYTES = 256 << 20  # of tables with a row per position: rotary tables, tokens of requests


def resolve(
    options: EngineOptions,
    hardware: Hardware,
    model: ModelConfig,
    size: NetworkSize = UNMEASURED,
    draft: DraftModel | None = None,
) -> EngineConfig:
    """Turn options, machine and model into the one configuration the engine runs with."""
    _check_choice("device", options.device, ("auto", "cpu", "cuda", "sim"))
    _check_choices(options)
    dtype = resolve_dtype(options.dtype, hardware, model)
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
    whole = _whole_prompts(options, model, max_model_len)
    max_num_seqs = _positive("max_num_seqs", options.max_num_seqs, USUAL_REQUESTS["cuda" if has_gpu else "cpu"])
    speculative = _fitting_speculation(options, max_num_seqs, draft)
    num_drafts = 0 if speculative is None else speculative.num_drafts
    budget = _resolve_budget(options, max_num_seqs, num_drafts, 8192 if has_gpu else 512, max_model_len if whole else 0)
    if options.block_size < 1 or options.block_size & (options.block_size - 1):
        raise ConfigError(f"block_size must be a power of two, not {options.block_size}")
    if not page_bytes(model.cache_specs, 1, dtype):  # pages without memory: one holds any request
        options = replace(options, block_size=1 << (max_model_len - 1).bit_length(), enable_prefix_caching=False)
    check_exact(options, model, size, speculative, hardware.device)
    backend = choose_backend(options.attention_backend, hardware.device, options.exact).name
    if model.source_encoder is not None and backend not in ATTENDS_ENCODED:
        raise ConfigError(
            f"attention_backend {backend} cannot attend to the output of an encoder; use "
            f"{', '.join(ATTENDS_ENCODED[:-1])} or {ATTENDS_ENCODED[-1]}"
        )
    keys_in = resolve_cache_dtype(options.kv_cache_dtype, hardware.device, dtype, backend)
    model, draft = model.with_keys_in(keys_in), draft and draft._replace(config=draft.config.with_keys_in(keys_in))
    graph_mode = _resolve_graph_mode(options.cudagraph_mode, hardware)
    refusal, needs = _prefix_refusal(options, model), _resolve_needs(speculative, backend)
    is_limited = options.prefer == "auto" and options.max_itl_ms is not None
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk=_positive("long_prefill_token_threshold", options.long_prefill_token_threshold, budget),
        whole_prompts=bool(whole),
        max_model_len=max_model_len,
        mixed_prefill_tokens=_positive("mixed_prefill_tokens", options.mixed_prefill_tokens, budget),
        max_itl_s=None if options.max_itl_ms is None else options.max_itl_ms / 1000,
        # ``build_serving_engine`` asks for balance.
        limits_time=not whole and (options.prefer == "balance" or is_limited),
        step_rates=expected_rates(model, size, dtype, has_gpu),
        prefix_caching=options.enable_prefix_caching and not refusal,
        prefix_caching_refused=refusal,
        exact_lengths=exact_lengths(backend, model, hardware, dtype, options.block_size, num_drafts),
        least_saved=None if refusal else _least_saved(options, backend, model, dtype, graph_mode),
        num_drafts=num_drafts,
        num_draft_slots=num_drafts * needs.slots_per_draft + needs.extra_slots,
        needs=needs,
        drafts_beside_prompts=_drafts_beside_prompts(speculative, graph_mode, backend),
    )
    cache = _resolve_cache(options, hardware, model, dtype, scheduler, size, draft)
    return EngineConfig(
        model=model,
        cache=cache,
        scheduler=scheduler if options.max_model_len else _limit_context(model, scheduler, cache),
        device=hardware.device,
        dtype=dtype,
        attention_backend=backend,
        mixed_attention=options.mixed_attention,
        prompt_kernel=_resolve_prompt_kernel(options.prompt_kernel, backend, hardware),
        steps_in_flight=_positive("steps_in_flight", options.steps_in_flight, 1 if hardware.device == "cpu" else 2),
        seed=options.seed,
        cudagraph_mode=graph_mode,
        cudagraph_sizes=_resolve_graph_sizes(options.cudagraph_capture_sizes, budget, max_num_seqs, size.num_params),
        poison=poison_enabled(),
        speculative=speculative,
        draft_model=None if draft is None else draft.config,
        num_draft_modules=1 if draft is None else min(draft.num_modules, num_drafts),
        weight_formats=size.formats,
        exact=options.exact,
        processor=describe_processor(hardware),
    )


def _limit_context(model: ModelConfig, scheduler: SchedulerConfig, cache: CacheConfig) -> SchedulerConfig:
    """The model's context; where its tables are large, no more of it than the cache can hold.

    No longer request fits the cache, and no tensor of a checkpoint confirms the context length that it states.
    """
    tables = [model.rope] if model.window_rope is None else [model.rope, model.window_rope]
    position_bytes = 4 * (sum(rope.rotary_dim for rope in tables) + scheduler.max_num_seqs + 1)
    useful_len = max(cache.num_usable_tokens, _SMALL_TABLE_BYTES // position_bytes)
    return replace(scheduler, max_model_len=min(scheduler.max_model_len, useful_len))


def _check_choices(options: EngineOptions) -> None:
    _check_choice("attention_backend", options.attention_backend, ("auto", *BACKENDS))
    _check_choice("cascade", options.cascade, ("auto", "always", "never"))
    _check_choice("cudagraph_mode", options.cudagraph_mode, ("auto", *GRAPH_MODES))
    _check_choice("mixed_attention", options.mixed_attention, ("apart", "together"))
    _check_choice("prompt_kernel", options.prompt_kernel, ("pointers", "tma"))
    _check_choice("prefer", options.prefer, ("auto", "balance", "throughput"))
    limit = options.max_itl_ms
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 1e9):
        raise ConfigError(f"max_itl_ms must be a number of milliseconds above 0, not {limit!r}")
    if limit is not None and options.prefer == "throughput":
        raise ConfigError("max_itl_ms limits steps, which prefer throughput fills; set one of them")


def _resolve_needs(speculative: SpeculativeConfig | None, backend: str) -> Needs:
    """The drafter's requirements with this configuration."""
    if speculative is None:
        return NO_NEEDS
    needs = speculative.needs
    if not needs.is_causal and backend not in NON_CAUSAL:
        raise ConfigError(
            f"{speculative.method} drafts in passes whose tokens see each other, which attention_backend {backend} "
            f"cannot do; use {', '.join(NON_CAUSAL[:-1])} or {NON_CAUSAL[-1]}"
        )
    return replace(needs, follows=needs.follows and speculative.adaptive)


def _drafts_beside_prompts(speculative: SpeculativeConfig | None, graph_mode: str, backend: str) -> int | None:
    # Without full graphs for mixed batches, drafts are proposed after the step, one launch at a time.
    in_graphs = graph_mode == "full" and backend in RECORDS_PROMPTS
    if speculative is None or not speculative.adaptive or not in_graphs:
        return None
    return speculative.num_proposed(speculative.initial_length)


def _prefix_refusal(options: EngineOptions, model: ModelConfig) -> str:
    """Why prefix caching is off although it was enabled; empty if it is not."""
    reasons = dict.fromkeys(spec.prefix_refusal for spec in model.cache_specs if spec.prefix_refusal)
    if not reasons or not options.enable_prefix_caching:
        return ""
    return f"prefix caching is off: {'; '.join(reasons)}; set enable_prefix_caching to false to say so yourself"


def _whole_prompts(options: EngineOptions, model: ModelConfig, max_model_len: int) -> str:
    """Why prompts are not computed in chunks; empty: they may be."""
    reason = next((spec.whole_prompts for spec in model.cache_specs if spec.whole_prompts), "")
    for name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        given = getattr(options, name)
        if reason and given is not None and given < max_model_len:
            raise ConfigError(f"{name} {given} is below max_model_len {max_model_len}: {reason}; change one of them")
    return reason


def _resolve_budget(options: EngineOptions, max_num_seqs: int, num_drafts: int, usual: int, longest: int) -> int:
    """Tokens of a step: at least one and its drafts for every running request; ``longest`` are those of a prompt that
    must be computed at once.
    """
    least = max_num_seqs * (1 + num_drafts)
    usual = max(usual, longest)
    budget = _positive("max_num_batched_tokens", options.max_num_batched_tokens, max(usual, least))
    if budget < least:
        each = f"a token and {num_drafts} drafts a step" if num_drafts else "a token a step"
        times = f" x {1 + num_drafts}" if num_drafts else ""
        raise ConfigError(
            f"max_num_batched_tokens {budget} is below max_num_seqs {max_num_seqs}{times}; "
            f"every running request needs {each}"
        )
    return budget


def _least_saved(options: EngineOptions, backend: str, model: ModelConfig, dtype: str, graph_mode: str) -> int | None:
    """From how many saved tokens on cascade attention pays; None where it is impossible or disabled."""
    if options.cascade == "always" and backend not in CASCADING:
        raise ConfigError(
            f"cascade always needs attention_backend {' or '.join(CASCADING)}, not {backend}; use cascade auto"
        )
    if options.exact or options.cascade == "never" or backend not in CASCADING or not options.enable_prefix_caching:
        return None
    if options.cascade == "always":
        return 1
    num_layers = model.num_attention_layers
    if not num_layers:
        return None
    layer_bytes = page_bytes([model.keys_and_values], 1, dtype)
    return least_saved(layer_bytes, num_layers, sum(map(bool, model.windows)), graph_mode)


def _fitting_speculation(
    options: EngineOptions, max_num_seqs: int, draft: DraftModel | None
) -> SpeculativeConfig | None:
    """The speculative configuration, an adaptive draft length limited to what drafter and step have room for."""
    speculative = read_speculation(options)
    if speculative is not None and draft is not None and draft.max_drafts is not None:
        speculative = speculative.lowered(draft.max_drafts)
    if speculative is None or options.max_num_batched_tokens is None:
        return speculative
    return speculative.lowered(options.max_num_batched_tokens // max_num_seqs - 1)


def resolve_dtype(asked: str, hardware: Hardware, model: ModelConfig) -> DTypeName:
    """The type of weights and activations."""
    _check_choice("dtype", asked, ("auto", *DTYPE_BYTES))
    if hardware.device == "cuda":
        if asked == "float64":
            raise ConfigError("dtype float64 runs on a CPU only; use bfloat16, float16 or float32")
        # A float16 checkpoint may have weights that bfloat16 would round; every other type fits.
        default = "float16" if model.dtype == "float16" else "bfloat16"
        return default if asked == "auto" else asked  # type: ignore[return-value]
    if asked == "auto":
        return "float32"  # safe, and fast on a CPU without matrix units
    if not hardware.dtype_works:
        raise ConfigError(f"{asked} matrix products crash on this CPU; use dtype float32")
    return asked  # type: ignore[return-value]


def _resolve_prompt_kernel(asked: str, backend: str, hardware: Hardware) -> str:
    """The other one where it does not run: on a GPU before Hopper, and in steps with another backend."""
    if asked == "tma" and backend not in PROMPT_KERNELS:
        raise ConfigError(f"prompt_kernel tma is one of attention_backend {' or '.join(PROMPT_KERNELS)}, not {backend}")
    is_old = hardware.capability is not None and hardware.capability < (9, 0)
    return "pointers" if is_old else asked


def _resolve_graph_mode(asked: str, hardware: Hardware) -> str:
    if hardware.device != "cpu":
        return "full" if asked == "auto" else asked
    if asked not in ("auto", "none"):
        raise ConfigError(f"cudagraph_mode {asked} needs a GPU; a CPU has no graphs, use auto or none")
    return "none"


def _resolve_graph_sizes(
    asked: tuple[int, ...] | None, max_num_tokens: int, max_num_seqs: int, num_params: int
) -> tuple[int, ...]:
    """Capture sizes: close together where batches are small, because padding is a share of the batch."""
    # The full batch always has a graph.
    decodes = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs + 1, 32), max_num_seqs)
    # Launching kernel by kernel takes 10 ms and more; so long a large model computes 512 tokens, a small one many more.
    most = int(4e12 / max(1, num_params))
    mixed = (size for power in range(9, 20) for size in (1 << power, 3 << (power - 1)) if max_num_seqs < size <= most)
    sizes: Iterable[int] = asked or (*decodes, *mixed)
    for size in sizes:
        _positive("cudagraph_capture_sizes", size, 1)
    return tuple(sorted({size for size in sizes if size <= max_num_tokens}))


def _resolve_cache(
    options: EngineOptions,
    hardware: Hardware,
    model: ModelConfig,
    dtype: str,
    scheduler: SchedulerConfig,
    size: NetworkSize,
    draft: DraftModel | None,
) -> CacheConfig:
    specs = model.cache_specs
    if draft is not None:
        specs += draft_cache_specs(draft.config, min(draft.num_modules, scheduler.num_drafts))
    of_a_page = page_bytes(specs, options.block_size, dtype)
    of_a_row = row_bytes(specs, scheduler.num_drafts, dtype)
    if options.num_gpu_blocks_override is not None:
        num_pages = _positive("num_gpu_blocks_override", options.num_gpu_blocks_override, 0)
    else:
        default = min(hardware.free_memory_bytes // 4, 4 * GIB)
        if hardware.device == "cuda" and options.kv_cache_memory_bytes is None:
            default = _gpu_cache_bytes(options, hardware, model, dtype, scheduler, size, draft)
        memory = _positive("kv_cache_memory_bytes", options.kv_cache_memory_bytes, default)
        memory = _without_rows(memory, of_a_page, of_a_row, scheduler)
        lengths = (scheduler.max_model_len, model.max_encoder_entries)
        most = scheduler.max_num_seqs * sum(-(-length // options.block_size) for length in lengths)
        num_pages = min(memory // of_a_page, most) if of_a_page else most
        if num_pages < 1:
            raise ConfigError(
                f"the KV cache of {memory} bytes holds no page of {of_a_page} bytes; raise kv_cache_memory_bytes"
            )
    return CacheConfig(page_size=options.block_size, num_pages=num_pages + 1)


def _without_rows(memory: int, of_a_page: int, of_a_row: int, scheduler: SchedulerConfig) -> int:
    """Memory left for pages after every request row, the scratch row included, has its recurrent states."""
    taken = (scheduler.max_num_seqs + 1) * of_a_row
    if taken == 0 or taken + of_a_page <= memory:
        return memory - taken
    raise ConfigError(
        f"the states of {scheduler.max_num_seqs} requests with {scheduler.num_drafts} drafts take "
        f"{taken / GIB:.2f} GiB of the {memory / GIB:.2f} GiB for states and KV cache, and leave no page: lower "
        f"max_num_seqs (at most {max(0, (memory - of_a_page) // of_a_row - 1)} fit), draft fewer tokens, or raise "
        "gpu_memory_utilization or kv_cache_memory_bytes"
    )


def _gpu_cache_bytes(
    options: EngineOptions,
    hardware: Hardware,
    model: ModelConfig,
    dtype: str,
    scheduler: SchedulerConfig,
    size: NetworkSize,
    draft: DraftModel | None,
) -> int:
    """What is left of the GPU memory share that the engine may use, other processes' use of it subtracted."""
    share = options.gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}")
    others = hardware.total_memory_bytes - hardware.free_memory_bytes
    weights = size.num_bytes + (draft.size.num_bytes if draft else 0)
    working = working_memory_bytes(model, dtype, scheduler)
    if draft is not None:
        # The drafter's activations, and the logits of all drafts where they are kept.
        working += working_memory_bytes(draft.config, dtype, scheduler) - GIB
        working += (scheduler.max_num_seqs + 1) * scheduler.num_drafts * draft.config.vocab_size * 4
        needs = scheduler.needs
        if needs.follows:  # tapped hidden states of the target
            notes = (needs.noted_steps + 1) * scheduler.max_num_seqs
            working += notes * needs.taps * model.hidden_size * DTYPE_BYTES[dtype]
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
    """An upper bound of a step's memory beside weights and cache: activations, logits, rows, and torch's own."""
    tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    widest = 2 * model.intermediate_size
    if model.experts is not None:
        widest = max(widest, model.experts.num_experts_per_token * (3 * model.experts.intermediate_size))
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    heads = max(heads, *(spec.working_values() for spec in set(model.cache_specs)))
    activations = tokens * (4 * model.hidden_size + heads + 2 * widest) * DTYPE_BYTES[dtype]
    if (encoder := model.source_encoder) is not None:  # of one input, beside the staging of a step's
        width = 8 * model.hidden_size + 2 * encoder.intermediate_size
        activations += encoder.max_frames * width * DTYPE_BYTES[dtype]
        activations += 4 * max(encoder.max_frames, tokens * encoder.frames_per_entry) * encoder.num_bins * 4
    # Logits in float32, and the copies that sampling parameters make.
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
