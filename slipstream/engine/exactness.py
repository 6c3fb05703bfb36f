"""Whether an engine can give the same tokens and log probabilities, to the bit, whatever is computed beside a request.

What cannot keep it says so itself: kinds of caches, layouts of weights, attention backends. Drafters need not keep
anything, for a draft is a question to the target and never its answer.
"""

from __future__ import annotations

from slipstream.config import EngineOptions, Hardware, ModelConfig, NetworkSize
from slipstream.errors import ConfigError
from slipstream.kernels import native
from slipstream.speculative_config import SpeculativeConfig


def check_exact(
    options: EngineOptions, model: ModelConfig, size: NetworkSize, speculative: SpeculativeConfig | None, device: str
) -> None:
    """Refuse what cannot keep it, with the reason in one line."""
    if options.exact and (reason := _refusal(options, model, size, speculative, device)):
        raise ConfigError(f"exact is not possible: {reason}")


def describe_processor(hardware: Hardware) -> str:
    """What computes, as far as it may change the last bits of a number."""
    return f"{hardware.name} {native.instructions_in_use()}" if hardware.device == "cpu" else hardware.name


def _refusal(
    options: EngineOptions, model: ModelConfig, size: NetworkSize, speculative: SpeculativeConfig | None, device: str
) -> str:
    if not model.has_logits:
        return f"{model.architecture} encodes texts and generates none"
    if reason := next((spec.exact_refusal for spec in model.cache_specs if spec.exact_refusal), ""):
        return reason
    if speculative is not None and not speculative.keeps_tokens:
        return f"with verify {speculative.verify} tokens depend on the drafts; use verify match"
    if options.cascade == "always":
        return "cascade always attends in another order where requests share a prefix; use cascade auto or never"
    if size.inexact and device == "cpu":
        return f"on a CPU {size.inexact} depend on the batch; it needs dtype float32, a C compiler and a dense model"
    if size.inexact:
        return f"{size.inexact} depend on the batch in their last bits"
    return ""
