"""When a prefix common to all requests of a step is read once and not by each of them. Plain numbers, no tensors.

Cascade saves reading keys and values again, layer by layer. It costs the whole-step graph: how many pages are common is
known on the host, and a captured graph would fix it.
"""

from __future__ import annotations

import math

# Bytes per second at which a plain step reads a common prefix: after the first request the keys come from the GPU's
# second-level cache. Measured on an NVIDIA H200 with 64 requests over 2,048 common tokens.
BYTES_PER_S = 7.6e12
# Cost of the kernels themselves: three launches instead of one, and the common keys once. Measured likewise.
OWN_S_PER_LAYER = 60e-6
# Cost per layer of losing graphs, by graph mode. Launched one by one, the kernels of 32 layers take the host 2 to 3 ms,
# nearly all of it added to the step where the GPU would otherwise run a single replay. Piecewise graphs contain about
# half of those launches.
LOST_S_PER_LAYER = {
    "full": 80e-6,
    "full_decode_only": 80e-6,
    "full_and_piecewise": 45e-6,
    # Attention is in no graph anyway; two more kernels are launched.
    "piecewise": 20e-6,
    "none": 20e-6,
}
# Prompts are not limited by bandwidth: a tile of their queries reads keys once for all its rows. A step of more tokens
# is mostly prompts; it runs without cascade, which needs less memory.
MAX_TOKENS = 2048


def least_saved(
    layer_bytes: int,  # keys and values of a token in one layer
    num_layers: int,
    num_windowed: int,  # of those, layers with a window, which save nothing
    graph_mode: str,
) -> int | None:
    """How many tokens' keys a step must save for cascade to pay; None if it never does."""
    if num_windowed == num_layers:
        return None
    num_whole = num_layers - num_windowed
    lost_s = num_layers * LOST_S_PER_LAYER[graph_mode] + num_whole * OWN_S_PER_LAYER
    return max(1, math.ceil(lost_s * BYTES_PER_S / (layer_bytes * num_whole)))


def pays(num_reqs: int, num_tokens: int, num_common_tokens: int, least: int) -> bool:
    """Whether cascade pays for this step, in which all requests but one save the common tokens."""
    return num_tokens <= MAX_TOKENS and (num_reqs - 1) * num_common_tokens >= least
