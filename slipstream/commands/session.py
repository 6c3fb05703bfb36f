"""A model for interactive commands: loading it, and showing an answer as it arrives."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from slipstream.checkpoints.hub import with_shipped_head
from slipstream.config import EngineOptions
from slipstream.engine.find_models import resolve_models
from slipstream.errors import RequestError
from slipstream.output import RequestOutput
from slipstream.speculate.options import synthetic_warning

if TYPE_CHECKING:
    from slipstream.llm import LLM


@contextmanager
def open_model(options: EngineOptions) -> Iterator[LLM]:
    """Download and load the model, with progress on standard error if that is a terminal."""
    if options.max_num_seqs is None:
        # One request at a time: a KV cache for many would only take memory and start-up time.
        options = replace(options, max_num_seqs=1)
    options = with_shipped_head(options, by_default=True)
    warn_if_synthetic(options)
    name, options = options.model, resolve_models(options)  # shows its own progress
    with Console(stderr=True).status(f"loading {name}") as status:
        from slipstream.engine.build import build_engine
        from slipstream.llm import LLM  # imports torch, which takes seconds

        def show(share: float) -> None:
            status.update(f"loading {name}: {share:.0%}")

        llm = LLM(build=lambda: build_engine(options, show))
    with llm:
        yield llm


def warn_if_synthetic(options: EngineOptions) -> None:
    """Printed before anything else, so that forced output is not taken for the model's. Refuses invalid speculation."""
    if (warning := synthetic_warning(options)) is not None:
        Console(stderr=True).print(f"WARNING: {warning}", style="bold red", soft_wrap=True, highlight=False)


def show_stream(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """Write the text to standard output piece by piece, and return the last output."""
    last = None
    try:
        for output in outputs:
            sys.stdout.write(output.delta_text)
            sys.stdout.flush()
            last = output
    finally:
        if last is not None and (last.text or last.error is None):  # after an error, print nothing but its line
            sys.stdout.write("\n")
            sys.stdout.flush()
    if last is None:
        raise RequestError("the engine gave no answer; try again")
    return check(last)


def check(output: RequestOutput) -> RequestOutput:
    """Raise the error of a request that failed on the way."""
    if output.error is not None:
        raise RequestError(output.error)
    return output
