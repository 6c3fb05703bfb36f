"""What vLLM reaches on one NVIDIA H200: the figures that benchmarks, pictures and the README compare with.

vLLM 0.26.0, torch 2.11, CUDA 13.0; bfloat16, greedy.
"""

from __future__ import annotations

VERSION = "vLLM 0.26.0"
# Output tokens per second of plain decoding, 128 prompt and 256 output tokens, the decode part; by case and batch.
PLAIN: dict[str, dict[int, int]] = {
    "smollm2-135m": {1: 622, 8: 4836, 32: 15763, 128: 39881},
    "llama-3.1-8b": {1: 202, 8: 1574, 64: 10566},
}
# With an EAGLE-3 head, k = 3, drafts accepted at fixed rates (``slipstream.models.shapes.FORCED_RATES``).
EAGLE3: dict[str, dict[int, int]] = {"llama-3.1-8b": {1: 388, 8: 2917, 64: 14579}}
EAGLE3_K = "3"
# Speed with n-gram drafts as a part of the plain one, SmolLM2-135M, by batch.
NGRAM_OF_PLAIN = {1: 0.33, 8: 0.23, 32: 0.28}
# Streamed chat over HTTP, SmolLM2-135M, 128 output tokens, closed loop, 512 rows: tokens per second, and milliseconds
# to the first token (median, 99th percentile), by streams.
SERVE: dict[int, tuple[int, int, int]] = {
    1: (565, 14, 19),
    8: (3958, 26, 30),
    32: (8582, 71, 123),
    128: (19750, 175, 253),
    512: (13754, 2202, 3797),
}
# Prompt tokens per second from submission to the last first token, by case and (batch, length).
PROMPTS: dict[str, dict[tuple[int, int], int]] = {
    "llama-3.1-8b": {(1, 2048): 41600, (1, 8192): 39700, (1, 32768): 27800, (8, 2048): 43000, (32, 512): 44000}
}
# Seconds for 256 requests at once, prompts of 100 to 2,000 and outputs of 50 to 400 tokens, by case and rows.
MIXED_SECONDS: dict[str, dict[int, float]] = {"llama-3.1-8b": {256: 11.05}}


def eagle3_peer(shape: str, k: str, batch: int) -> int | None:
    """The figure for so many drafts, 0 for plain decoding; None where there is none."""
    table = {"0": PLAIN, EAGLE3_K: EAGLE3}.get(k, {})
    return table.get(shape, {}).get(batch)
