"""The checkpoints that the options name, as paths on this machine: the target's, and the drafter's. No torch."""

from __future__ import annotations

from dataclasses import replace

from slipstream.config import EngineOptions
from slipstream.models.hub import resolve_model
from slipstream.speculate.options import read_speculation


def resolve_models(options: EngineOptions) -> EngineOptions:
    """The options with paths for names, of the draft model too; fetches what is not here yet.

    What they say of speculation is checked first: a wrong word there must not cost a download.
    """
    speculative = read_speculation(options)
    options = replace(options, model=str(resolve_model(options.model)))
    if speculative is None or speculative.model is None:
        return options
    draft_path = str(resolve_model(speculative.model, is_head=speculative.needs.taps > 0))
    if options.speculative_config is None:
        return replace(options, draft_model=draft_path)
    return replace(options, speculative_config={**options.speculative_config, "model": draft_path})
