"""Training on the GPU: the states that Triton's attention gives, and a tiny head that learns in bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers writes the tiny models")
from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.cli import main
from slipstream.llm import LLM
from slipstream.sampling_params import SamplingParams
from slipstream.train.target import load_target
from tests import tiny_models
from tests.train.conftest import TAPS, arguments, build_target

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The kernels need heads of at least 16.
    return tiny_models.save(build_target(head_dim=16), tmp_path_factory.mktemp("target"))


def test_states_are_those_of_the_cpu(folder: Path) -> None:
    token_ids = torch.randint(0, 256, (5, 224), generator=torch.Generator().manual_seed(0))
    outputs = [
        load_target(folder, open_checkpoint(folder), TAPS, device, dtype).read(token_ids)
        for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16"))
    ]
    for wide, expected in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(wide.cpu(), expected, rtol=2e-2, atol=2e-2)  # products may be made in TF32
    for narrow, expected in zip(outputs[2], outputs[0], strict=True):
        error = (narrow.cpu().float() - expected).norm() / expected.norm()
        assert float(error) < 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_head_learns_and_goes_on(folder: Path, tmp_path: Path, dtype: str) -> None:
    options = {"dtype": dtype, "device": "cuda", "steps": 150, "batch_tokens": 4096, "checkpoint_every": 50}
    assert main(arguments(folder, tmp_path / "head", **options)) == 0
    curves = json.loads((tmp_path / "head" / "training" / "curves.json").read_text())
    assert curves["acceptance"][0][0] < 0.1 and curves["acceptance"][-1][0] > 0.4
    assert len(curves["losses"]) == 150
    again = Path(shutil.copytree(tmp_path / "head", tmp_path / "again"))
    assert main(arguments(folder, again, **options)) == 0, "a training that is over is written again"
    with LLM(str(folder), dtype=dtype, speculate="eagle3", draft_model=str(again), k=3, max_num_seqs=8) as llm:
        prompts = ["user: a", "user: something else", "user: 1 2 3"]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=96))
        assert llm.stats.num_accepted_tokens / llm.stats.num_draft_tokens > 0.2
