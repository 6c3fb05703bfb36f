"""How much a program of latent attention has at once, by what its GPU has room for.

Bytes are those of the compiled kernels. Sizes of entries, keys and values are padded to powers of two.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.triton_jit import next_power_of_2, triton


class Room(NamedTuple):
    """What a program may use, for those who choose how much it has at once."""

    shared: int  # bytes
    buffers: int  # of what is loaded ahead, if the compiler is asked for two stages of a product of 64 rows or more


def room_of(tensor: Tensor) -> Room:
    """Where this tensor lies; on the smallest GPUs, if it does not lie on one."""
    return _room(tensor.device) if tensor.is_cuda else Room(101_376, 3)


@functools.cache
def _room(device: torch.device) -> Room:
    # Hopper and large Blackwell multiply from shared memory while the next operands arrive.
    buffers = {9: 2, 10: 3}.get(torch.cuda.get_device_capability(device)[0], 1)
    return Room(int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]), buffers)


class Tile(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tile(rows: int, entry_bytes: int, item_bytes: int, room: Room) -> Tile:
    """The first that has no more rows than there are and fits.

    With fewer warps, the compiler spills registers of tiles with 512 + 64 numbers in an entry. Float32 is multiplied
    without tensor cores, for which small tiles are enough.
    """
    if item_bytes > 2:
        return Tile(16, 16, 4, 2)
    wanted = max(16, next_power_of_2(rows))
    tiles = (
        (Tile(64, 64, 8, 2), room.buffers),
        (Tile(64, 32, 8, 2), room.buffers),
        (Tile(32, 32, 8, 5), 2),
        (Tile(32, 32, 8, 2), 1),
        (Tile(16, 32, 4, 5), 2),
    )
    for tile, buffers in tiles:
        needed = (tile.rows + buffers * tile.keys) * entry_bytes + tile.rows * tile.keys * item_bytes
        if tile.rows <= wanted and needed + 1024 <= room.shared:
            return tile
    return Tile(16, 16, 4, 2)


def prompt_tile(max_query_len: int, row_bytes: tuple[int, int], item_bytes: int, room: Room) -> Tile:
    """The first that has no more queries than there are and fits; bytes of a row of keys and of a row of values."""
    wanted, (key_bytes, value_bytes) = max(16, next_power_of_2(max_query_len)), row_bytes
    tiles = (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 8, 2))
    for tile in tiles if item_bytes <= 2 else tiles[3:]:
        buffers = tile.num_stages - 1 + (tile.rows >= 64 and room.buffers > 1)
        needed = tile.rows * key_bytes + buffers * tile.keys * (key_bytes + value_bytes)
        if tile.rows <= wanted and needed + tile.rows * tile.keys * 4 <= room.shared:
            return tile
    return Tile(16, 16, 4, 2)
