"""When a beginning that all requests of a step share is read once and not by each of them. Plain numbers, no tensors.

A step saves the keys and values that it does not read again, layer by layer. It loses its whole-step graph: how many
pages are common is the host's knowledge, and a recording would freeze it.
"""

from __future__ import annotations

import math

# What a plain step reads of a common beginning in a second: after the first request the keys come from the GPU's
# second-level cache. Measured on an NVIDIA H200 with 64 requests over 2,048 common tokens.
BYTES_PER_S = 7.6e12
# What the kernels themselves take: three launches where there was one, and common keys once. Measured likewise.
OWN_S_PER_LAYER = 60e-6
# What a step loses in each layer, by how much of it would have run in graphs. Launched one by one, the kernels of 32
# layers take the host 2 to 3 ms, nearly all of it lost where the GPU would not have had to wait for a single replay.
# In pieces about half of those launches are inside.
LOST_S_PER_LAYER = {
    "full": 80e-6,
    "full_decode_only": 80e-6,
    "full_and_piecewise": 45e-6,
    # No graph holds attention anyway; two more kernels are launched.
    "piecewise": 20e-6,
    "none": 20e-6,
}
# Prompts are no matter of bandwidth: a tile of their queries reads keys once for all its rows. A step of more tokens is
# mostly prompts; it goes the plain way, which needs less memory.
MAX_TOKENS = 2048


def least_saved(
    layer_bytes: int,  # keys and values of a token in one layer
    num_layers: int,
    num_windowed: int,  # of those, layers with a window: they read what is near, and nothing is saved
    graph_mode: str,
) -> int | None:
    """How many tokens' keys a step must not read again for that to pay; None if it never does."""
    if num_windowed == num_layers:
        return None
    num_whole = num_layers - num_windowed
    lost_s = num_layers * LOST_S_PER_LAYER[graph_mode] + num_whole * OWN_S_PER_LAYER
    return max(1, math.ceil(lost_s * BYTES_PER_S / (layer_bytes * num_whole)))


def pays(num_reqs: int, num_tokens: int, num_common_tokens: int, least: int) -> bool:
    """A step of so many tokens, of which all requests but one are spared the common ones."""
    return num_tokens <= MAX_TOKENS and (num_reqs - 1) * num_common_tokens >= least
