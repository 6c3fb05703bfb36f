"""The public surface: changing it is a decision, so it is written down here."""

from __future__ import annotations

import subprocess
import sys

import slipstream


def test_public_names() -> None:
    assert sorted(slipstream.__all__) == [
        "AsyncLLM",
        "ClassificationOutput",
        "Completion",
        "ConfigError",
        "EmbeddingOutput",
        "EngineError",
        "LLM",
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
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None


def test_importing_the_package_imports_no_torch() -> None:
    code = "import slipstream, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
