"""Every block encoding the ``gguf`` package can read, and the common ones from their published layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import _type_traits, dequantize

from slipstream.checkpoints.checkpoint import open_checkpoint
from tests.checkpoints.tiny_gguf import random_state, write_model

Q = gguf.GGMLQuantizationType
NUM_ROWS, ROW_LEN = 11, 512
NAME, HF_NAME = "blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"


def random_blocks(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """[rows, bytes]: any bytes are a valid block, though some of its scales may be infinite or no number."""
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(int(kind)).integers(0, 256, (NUM_ROWS, ROW_LEN // block_len * block_bytes), np.uint8)


def load(path: Path, raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    state = random_state("qwen2", 50)
    del state[HF_NAME]
    write_model(path, "qwen2", state, raw_tensors={NAME: (raw, kind)})
    return dict(open_checkpoint(path).tensors())[HF_NAME]


@pytest.mark.parametrize("kind", sorted(_type_traits), ids=lambda kind: kind.name)
def test_pieces_equal_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: gguf.GGMLQuantizationType
) -> None:
    monkeypatch.setattr("slipstream.checkpoints.gguf._PIECE_ELEMENTS", 3 * ROW_LEN)  # 11 rows: the last piece is short
    raw = random_blocks(kind)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, kind)
        loaded = load(tmp_path / "m.gguf", raw, kind)
    assert loaded.shape == expected.shape == (NUM_ROWS, ROW_LEN)
    assert np.array_equal(loaded.float().numpy(), expected, equal_nan=True)
    assert np.isfinite(expected).mean() > 0.5


def test_no_encoding_was_forgotten() -> None:
    names = {kind.name for kind in _type_traits}
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"} <= names
    assert {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"} <= names
    assert {"TQ1_0", "TQ2_0", "MXFP4"} <= names


def half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a byte offset of every block: [num_blocks, 1] float64."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float64)


def nibbles(packed: np.ndarray) -> np.ndarray:
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int64)


def q8_0(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0) * blocks[:, 2:].view(np.int8)


def q4_0(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0) * (nibbles(blocks[:, 2:]) - 8)


def q4_1(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0) * nibbles(blocks[:, 4:]) + half(blocks, 2)


def q5_0(blocks: np.ndarray) -> np.ndarray:
    """The fifth bits of the 32 values are one little-endian number."""
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").astype(np.int64)
    return half(blocks, 0) * (nibbles(blocks[:, 6:]) + 16 * fifth - 16)


def q4_k(blocks: np.ndarray) -> np.ndarray:
    """256 values in 8 groups; scales and minima have 6 bits, those of the last four groups split in 4 and 2."""
    packed = blocks[:, 4:16].astype(np.int64)
    out = np.empty((len(blocks), 256))
    for group in range(8):
        if group < 4:
            scale, minimum = packed[:, group] & 63, packed[:, group + 4] & 63
        else:
            scale = packed[:, group + 4] & 15 | packed[:, group - 4] >> 6 << 4
            minimum = packed[:, group + 4] >> 4 | packed[:, group] >> 6 << 4
        pair = blocks[:, 16 + group // 2 * 32 : 48 + group // 2 * 32]
        numbers = pair >> 4 if group % 2 else pair & 15
        values = half(blocks, 0) * scale[:, None] * numbers - half(blocks, 2) * minimum[:, None]
        out[:, group * 32 : group * 32 + 32] = values
    return out


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """Two halves of 128 values: 64 bytes of low nibbles, 32 bytes of high pairs of bits, 8 signed scales each."""
    out = np.empty((len(blocks), 256))
    for idx in range(256):
        part, place = divmod(idx, 128)
        quarter, lane = divmod(place, 32)
        low = blocks[:, part * 64 + quarter % 2 * 32 + lane].astype(np.int64) >> quarter // 2 * 4 & 15
        high = blocks[:, 128 + part * 32 + lane].astype(np.int64) >> quarter * 2 & 3
        scale = blocks[:, 192 + idx // 16].view(np.int8).astype(np.int64)
        out[:, idx] = half(blocks, 208)[:, 0] * scale * ((low | high << 4) - 32)
    return out


# Where a block has its float16 scales.
BY_HAND: dict[gguf.GGMLQuantizationType, tuple[Callable[[np.ndarray], np.ndarray], tuple[int, ...]]] = {
    Q.Q4_0: (q4_0, (0,)),
    Q.Q4_1: (q4_1, (0, 2)),
    Q.Q5_0: (q5_0, (0,)),
    Q.Q8_0: (q8_0, (0,)),
    Q.Q4_K: (q4_k, (0, 2)),
    Q.Q6_K: (q6_k, (208,)),
}


@pytest.mark.parametrize("kind", BY_HAND, ids=lambda kind: kind.name)
def test_published_layouts(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    by_hand, scales = BY_HAND[kind]
    raw = random_blocks(kind)
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    for start in scales:
        values = np.random.default_rng(start).normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = values.view(np.uint8)
    loaded = load(tmp_path / "m.gguf", raw, kind)
    assert loaded.dtype == torch.float32
    np.testing.assert_allclose(loaded.numpy(), by_hand(blocks).reshape(NUM_ROWS, ROW_LEN), rtol=1e-6, atol=1e-5)
