from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from slipstream.kernels import triton_jit
from slipstream.kernels.attention.latent_tiles import Room, decode_tile, prompt_tile, room_of

GPUS = {
    "sm_80": Room(166_912, 1),
    "sm_89": Room(101_376, 1),
    "sm_90": Room(232_448, 2),
    "sm_100": Room(232_448, 3),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("rows", [1, 16, 17, 40, 64, 2176])
def test_tiles_fit_and_are_no_larger_than_needed(gpu: str, item_bytes: int, rows: int) -> None:
    """With one buffer for each stage but the last, and the one more of those that multiply from shared memory."""
    room = GPUS[gpu]
    tile = decode_tile(rows, 576 * item_bytes, item_bytes, room)
    keys = tile.keys * (room.buffers if tile.rows == 64 else 1)
    assert (tile.rows + keys) * 576 * item_bytes <= room.shared
    assert tile.rows == 16 or tile.rows < 2 * rows
    tile = prompt_tile(rows, (192 * item_bytes, 128 * item_bytes), item_bytes, room)
    keys = tile.keys * (tile.num_stages - (room.buffers == 1))
    assert (tile.rows * 192 + keys * 320) * item_bytes <= room.shared
    assert tile.rows == 16 or tile.rows < 2 * rows


def test_large_gpus_have_large_tiles() -> None:
    assert decode_tile(128, 1152, 2, GPUS["sm_90"])[:2] == (64, 64)
    assert decode_tile(16, 1152, 2, GPUS["sm_90"])[:2] == (16, 32)
    assert prompt_tile(4096, (384, 256), 2, GPUS["sm_90"])[:2] == (128, 64)


def test_without_a_gpu_the_smallest_is_meant() -> None:
    assert room_of(torch.zeros(1)).shared == min(room.shared for room in GPUS.values())


@pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, "bfloat16"),
        *(
            pytest.param(capability, dtype, marks=pytest.mark.slow)
            for capability in (80, 89, 90, 100, 120)
            for dtype in ("bfloat16", "float16", "float32")
        ),
    ],
)
def test_tiles_of_this_gpu_compile(capability: int, dtype: str) -> None:
    command = [sys.executable, "-m", "tests.kernels.attention.compile_latent", str(capability), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
