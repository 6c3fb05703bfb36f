"""Prompt attention through TMA: when it is used, and what the compiler makes of it. Its results: the kernels' cases."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from slipstream.attention.backend import AttentionLayer
from slipstream.attention.backends.triton import TritonBackend
from slipstream.config import EngineOptions, Hardware
from slipstream.engine.resolve import resolve
from slipstream.errors import ConfigError
from slipstream.kernels import triton_jit
from slipstream.kernels.attention import tma_attention as kernel_file
from slipstream.kernels.attention.tma_attention import can_use_tma, prompt_tiles
from tests.attention.mixed_batches import DIM, HEADS, KV_HEADS, draw_batch, draw_values
from tests.kernels.attention.dense_attention import dense_attention
from tests.kernels.triton_check import TOLERANCE, quietly_interpreted
from tests.test_config import CPU, GPU, MODEL

# Of one program, on Hopper and on the smaller Blackwell.
SHARED_BYTES = {90: 232_448, 120: 101_376}

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")


@pytest.mark.parametrize("has_decodes", [True, False])
def test_a_step_of_the_backend(monkeypatch: pytest.MonkeyPatch, has_decodes: bool) -> None:
    """Alone, and beside decodes, against a sum over the slots that a token sees."""
    drawn = (draw_batch(seed, 3, 2) for seed in range(200))
    common = next(c for c in drawn if (0 < c.num_decodes < 3) == has_decodes and c.num_decodes < 3)
    torch.manual_seed(0)
    q, cache = (values.float() for values in draw_values(common))
    launches, launch = [], kernel_file.launch_tma
    for module in (kernel_file, sys.modules["slipstream.kernels.attention.mixed_attention"]):
        monkeypatch.setattr(module, "launch_tma", lambda *args: (launches.append(args), launch(*args)))
    backend = TritonBackend(prompt_kernel="tma")
    with quietly_interpreted():
        found = backend.run(AttentionLayer(0, HEADS, KV_HEADS, DIM, DIM**-0.5), q, cache, backend.build(common))
    assert len(launches) == 1
    expected = dense_attention(q, cache, *common.requests[:4], DIM**-0.5, 0)
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_what_it_does_not_serve_goes_the_other_way() -> None:
    common = draw_batch(0, 3, 2)
    q, cache = draw_values(common)
    requests = common.requests
    assert not can_use_tma(q, cache, requests), "on a CPU"
    with quietly_interpreted():
        assert can_use_tma(q, cache, requests)
        assert not can_use_tma(q.float(), cache, requests), "another type of keys"
        assert not can_use_tma(q[..., :48], cache[..., :48].contiguous(), requests), "another head"
        assert not can_use_tma(q, cache[:, :, :, :8].contiguous(), requests), "pages of eight"
        assert not can_use_tma(q, cache, requests._replace(seq_starts=requests.seq_lens)), "a drafter's keys"


def test_gpus_before_hopper_have_the_other_kernel() -> None:
    def kernel(hardware: Hardware, **options: object) -> str:
        return resolve(EngineOptions(**options), hardware, MODEL).prompt_kernel  # type: ignore[arg-type]

    hopper, ampere = (replace(GPU, capability=capability) for capability in ((9, 0), (8, 0)))
    assert kernel(hopper) == kernel(ampere, prompt_kernel="tma") == "pointers"
    assert kernel(hopper, prompt_kernel="tma") == "tma"
    with pytest.raises(ConfigError, match="prompt_kernel tma is one of attention_backend triton, not cpu"):
        kernel(CPU, prompt_kernel="tma")
    with pytest.raises(ConfigError, match="prompt_kernel must be one of"):
        kernel(hopper, prompt_kernel="fast")


def test_every_size_has_tiles_on_a_hopper_and_the_usual_one_on_small_gpus() -> None:
    for head_dim in (64, 128, 256):
        for page_size in (16, 32, 64, 128):
            tiles = prompt_tiles(head_dim, page_size, SHARED_BYTES[90])
            assert len(tiles) == len(set(tiles)) >= 2
    assert prompt_tiles(128, 64, SHARED_BYTES[90])[0] == (128, 8, 3, False)
    assert prompt_tiles(128, 64, SHARED_BYTES[120])[0] == (128, 8, 2, False)
    assert prompt_tiles(256, 128, SHARED_BYTES[120]) == []


@pytest.mark.parametrize(
    ("capability", "most"),
    [
        (90, 1),
        pytest.param(90, 100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(100, 100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(120, 100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_it_is_compiled_to_tensor_cores_and_tma(capability: int, most: int) -> None:
    """By its PTX. In a process of its own: here kernels are interpreted."""
    command = [sys.executable, "-m", "tests.kernels.attention.compile_tma", str(capability), "bfloat16", str(most)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all there") >= 5
