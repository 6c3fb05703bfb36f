"""A model opened for one person at the terminal: loading it, and showing an answer as it arrives."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from slipstream.config import EngineOptions
from slipstream.errors import RequestError
from slipstream.models.hub import resolve_model
from slipstream.types import RequestOutput

if TYPE_CHECKING:
    from slipstream.llm import LLM


@contextmanager
def open_model(options: EngineOptions) -> Iterator[LLM]:
    """Fetch and load the model, with progress on standard error where that is a terminal."""
    path = resolve_model(options.model)  # shows its own progress
    with Console(stderr=True).status(f"loading {options.model}"):
        from slipstream.engine.build import build_engine
        from slipstream.llm import LLM  # with torch, which takes seconds of its own

        if options.max_num_seqs is None:
            # One request at a time: a KV cache for many would only take memory and start-up time.
            options = replace(options, max_num_seqs=1)
        options = replace(options, model=str(path))
        llm = LLM(build=lambda: build_engine(options))
    with llm:
        yield llm


def show_stream(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """Write the text to standard output piece by piece, and return the last output."""
    last = None
    try:
        for output in outputs:
            sys.stdout.write(output.delta_text)
            sys.stdout.flush()
            last = output
    finally:
        if last is not None:
            sys.stdout.write("\n")
            sys.stdout.flush()
    if last is None:
        raise RequestError("the engine gave no answer; try again")
    return check(last)


def check(output: RequestOutput) -> RequestOutput:
    """Turn a request that failed on the way into the error it carries."""
    if output.error is not None:
        raise RequestError(output.error)
    return output
