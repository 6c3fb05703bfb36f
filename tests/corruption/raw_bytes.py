"""Damage to a file as bytes: what a broken disk or a broken transfer leaves."""

from __future__ import annotations

import random

_HEAD = 4096  # what is read before the weights


def damage_bytes(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """The bytes after damage, and what was done; half of all damage hits the beginning of the file."""
    kind = rng.choice((_flip, _flip, _truncate, _overwrite, _splice, _cut_out, _fill))
    size = len(content) if rng.random() < 0.5 else min(len(content), _HEAD)
    return kind(rng, content, max(1, size))


def _flip(rng: random.Random, content: bytes, size: int) -> tuple[bytes, str]:
    damaged = bytearray(content)
    offsets = [rng.randrange(size) for _ in range(rng.choice((1, 1, 2, 8)))]
    for offset in offsets:
        damaged[offset] ^= 1 << rng.randrange(8)
    return bytes(damaged), f"flip a bit at {offsets}"


def _truncate(rng: random.Random, content: bytes, size: int) -> tuple[bytes, str]:
    kept = rng.randrange(size)
    return content[:kept], f"keep {kept} bytes"


def _overwrite(rng: random.Random, content: bytes, size: int) -> tuple[bytes, str]:
    start, num_bytes = rng.randrange(size), rng.choice((1, 4, 8, 64))
    return content[:start] + rng.randbytes(num_bytes) + content[start + num_bytes :], (
        f"{num_bytes} random bytes at {start}"
    )


def _splice(rng: random.Random, content: bytes, size: int) -> tuple[bytes, str]:
    source, target, num_bytes = rng.randrange(size), rng.randrange(size), rng.choice((4, 16, 100, 1000))
    piece = content[source : source + num_bytes]
    over = len(piece) if rng.random() < 0.5 else 0
    return content[:target] + piece + content[target + over :], (
        f"{len(piece)} bytes of {source} {'over' if over else 'before'} {target}"
    )


def _cut_out(rng: random.Random, content: bytes, size: int) -> tuple[bytes, str]:
    start, num_bytes = rng.randrange(size), rng.choice((1, 4, 100, 1000))
    return content[:start] + content[start + num_bytes :], f"without {num_bytes} bytes at {start}"


def _fill(rng: random.Random, content: bytes, size: int) -> tuple[bytes, str]:
    start, num_bytes, value = rng.randrange(size), rng.choice((1, 8, 64, 1000)), rng.choice((0, 255))
    end = min(len(content), start + num_bytes)
    return content[:start] + bytes([value]) * (end - start) + content[end:], f"{end - start} times {value} at {start}"
