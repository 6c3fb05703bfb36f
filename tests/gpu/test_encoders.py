"""Encoders on the GPU under the guard: vectors of a tiny model in graphs and without, beside the CPU's in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slipstream.llm import LLM

tiny_encoders = pytest.importorskip("tests.models.tiny_encoders", reason="transformers makes the tiny models")
pytestmark = pytest.mark.gpu

LENGTHS = (1, 128, 17, 17, 64, 65, 5, 90)


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "1")


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise", "none"])
@pytest.mark.parametrize("variant", ["bert", "xlm-roberta", "mpnet"])
def test_vectors_of_the_cpu(tmp_path: Path, variant: str, mode: str) -> None:
    folder = tiny_encoders.save(tiny_encoders.build(variant), tmp_path)
    texts = [[2 + (7 * i + n) % 240 for i in range(n)] for n in LENGTHS]
    with LLM(str(folder), device="cpu", dtype="float64") as llm:
        expected = [output.embedding for output in llm.embed(texts)]
    with LLM(str(folder), device="cuda", dtype="float32", cudagraph_mode=mode, max_num_seqs=4) as llm:
        for output, vector in zip(llm.embed(texts), expected, strict=True):
            np.testing.assert_allclose(output.embedding, vector, rtol=0, atol=2e-5)
        assert llm.stats.num_sync_violations == 0


def test_scores_of_the_cpu(tmp_path: Path) -> None:
    folder = tiny_encoders.save(tiny_encoders.build("bert-cross-encoder"), tmp_path)
    documents = ["one thing", "another", "something else entirely"]
    with LLM(str(folder), device="cpu", dtype="float64") as llm:
        expected = [output.score for output in llm.score("what is it", documents)]
    with LLM(str(folder), device="cuda", dtype="float32") as llm:
        found = [output.score for output in llm.score("what is it", documents)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
