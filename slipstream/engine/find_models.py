"""Resolves the checkpoints that the options name to paths on this machine, downloading them if needed. No torch."""

from __future__ import annotations

from dataclasses import replace

from slipstream.checkpoints.hub import resolve_model
from slipstream.config import EngineOptions
from slipstream.speculate.options import read_speculation


def resolve_models(options: EngineOptions) -> EngineOptions:
    """The options with local paths of target and draft model; downloads what is missing.

    Speculative options are checked first: a misspelt one must not cost a download.
    """
    speculative = read_speculation(options)
    options = replace(options, model=str(resolve_model(options.model)))
    if speculative is None or speculative.model is None:
        return options
    draft_path = str(resolve_model(speculative.model, is_head=speculative.needs.taps > 0))
    if options.speculative_config is None:
        return replace(options, draft_model=draft_path)
    return replace(options, speculative_config={**options.speculative_config, "model": draft_path})
