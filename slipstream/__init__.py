"""Slipstream: an LLM inference engine built around speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, EngineError, ModelError, RequestError, SlipstreamError
from slipstream.output import (
    ClassificationOutput,
    Completion,
    EmbeddingOutput,
    RequestOutput,
    RerankOutput,
    ScoreOutput,
)
from slipstream.sampling_params import SamplingParams
from slipstream.structured import StructuredOutput
from slipstream.transcription.options import TranscriptionOptions
from slipstream.transcription.result import Segment, Transcription

if TYPE_CHECKING:
    from slipstream.llm import LLM, AsyncLLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationOutput",
    "Completion",
    "ConfigError",
    "EmbeddingOutput",
    "EngineError",
    "ModelError",
    "RequestError",
    "RequestOutput",
    "RerankOutput",
    "SamplingParams",
    "ScoreOutput",
    "Segment",
    "SlipstreamError",
    "StructuredOutput",
    "Transcription",
    "TranscriptionOptions",
]


def __getattr__(name: str) -> Any:
    # These names import torch, which takes seconds; `slipstream --help` should not.
    if name in ("LLM", "AsyncLLM"):
        from slipstream import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'slipstream' has no attribute '{name}'")
