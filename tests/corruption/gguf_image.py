"""A GGUF file taken apart and put together again, with any of its parts wrong. Shares nothing with the engine's reader.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _ALIGNMENT = 8, 9, 32
_NUMBERS = (0, 1, 2, 3, 7, 255, 1 << 15, 1 << 16, 1 << 23, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40)
_WIDE = (*_NUMBERS, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_FLOATS = (0.0, -1.0, 0.5, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"))


@dataclass
class Value:
    type_id: int
    content: Any  # bytes of a string or of a whole array, a number, or a list of values
    item_type: int = 0
    count: int | None = None  # what the file says of an array's length, where that is a lie


@dataclass
class Row:
    name: bytes
    dims: list[int]
    type_id: int
    offset: int


@dataclass
class Image:
    version: int
    pairs: list[tuple[bytes, Value]]
    rows: list[Row]
    data: bytes
    counts: list[int] = field(default_factory=list)  # of tensors and pairs, where those are lies

    @classmethod
    def read(cls, content: bytes) -> Image:
        reader = _Reader(content)
        _, version, num_rows, num_pairs = reader.take("<4sIQQ")
        pairs = [(reader.string(), reader.value(reader.take("<I")[0])) for _ in range(num_pairs)]
        rows = []
        for _ in range(num_rows):
            name, (num_dims,) = reader.string(), reader.take("<I")
            rows.append(Row(name, list(reader.take(f"<{num_dims}Q")), *reader.take("<IQ")))
        return cls(version, pairs, rows, content[-(-reader.position // _ALIGNMENT) * _ALIGNMENT :])

    def write(self) -> bytes:
        counts = self.counts or [len(self.rows), len(self.pairs)]
        head = b"GGUF" + struct.pack("<IQQ", self.version, *counts)
        head += b"".join(_string(key) + struct.pack("<I", value.type_id) + _pack(value) for key, value in self.pairs)
        for row in self.rows:
            head += _string(row.name) + struct.pack(f"<I{len(row.dims)}Q", len(row.dims), *row.dims)
            head += struct.pack("<IQ", row.type_id, row.offset)
        return head + bytes(-len(head) % _ALIGNMENT) + self.data


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(layout, self.content, self.position)
        self.position += struct.calcsize(layout)
        return found

    def string(self) -> bytes:
        (length,) = self.take("<Q")
        (text,) = self.take(f"{length}s")
        return bytes(text)

    def value(self, type_id: int) -> Value:
        if type_id == _STRING:
            return Value(type_id, self.string())
        if type_id == _ARRAY:
            item_type, count = self.take("<IQ")
            return Value(type_id, [self.value(item_type) for _ in range(count)], item_type)
        return Value(type_id, self.take("<" + _FORMATS[type_id])[0])


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _pack(value: Value) -> bytes:
    if value.type_id == _STRING:
        return _string(value.content)
    if value.type_id == _ARRAY and isinstance(value.content, bytes):
        return value.content
    if value.type_id == _ARRAY:
        count = len(value.content) if value.count is None else value.count
        return struct.pack("<IQ", value.item_type, count) + b"".join(map(_pack, value.content))
    layout = _FORMATS.get(value.type_id, "Q")
    if layout in "fd":
        return struct.pack("<" + layout, value.content)
    width = struct.calcsize(layout)
    return (int(value.content) % (1 << 8 * width)).to_bytes(width, "little")


# --- damage ---------------------------------------------------------------------------------------


def nested(depth: int) -> Value:
    """Arrays of one array each; the innermost is empty."""
    return Value(_ARRAY, struct.pack("<IQ", _ARRAY, 1) * (depth - 1) + struct.pack("<IQ", 4, 0))


def damage_gguf(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """The file after one or two changes to its metadata or its table of tensors, and what they were."""
    image, notes = Image.read(content), []
    for _ in range(rng.choice((1, 1, 1, 2))):
        (damage,) = rng.choices(list(_DAMAGES), list(_DAMAGES.values()))
        notes.append(damage(rng, image))
    return image.write(), "; ".join(notes)


def _change_number(rng: random.Random, image: Image) -> str:
    indices = [idx for idx, (_, value) in enumerate(image.pairs) if value.type_id in _FORMATS]
    if not indices:
        return "nothing"
    key, value = image.pairs[rng.choice(indices)]
    value.content = rng.choice(_FLOATS if _FORMATS[value.type_id] in "fd" else _WIDE)
    return f"{key!r} = {value.content}"


def _change_type(rng: random.Random, image: Image) -> str:
    idx = rng.randrange(len(image.pairs))
    key = image.pairs[idx][0]
    value = rng.choice(
        (
            Value(_STRING, rng.choice((b"", b"x", b"\xff\xfe", b"1" * 5000))),
            Value(4, rng.choice(_NUMBERS)),
            Value(11, rng.choice(_WIDE)),
            Value(6, rng.choice(_FLOATS)),
            Value(7, rng.choice((0, 1, 255))),
            Value(_ARRAY, [Value(4, rng.choice(_NUMBERS)) for _ in range(rng.randrange(4))], 4),
            Value(_ARRAY, [Value(_STRING, b"a b") for _ in range(rng.randrange(4))], _STRING),
            nested(rng.choice((2, 10, 500, 2000))),
            Value(rng.choice((13, 99, (1 << 32) - 1)), 0),
        )
    )
    image.pairs[idx] = (key, value)
    content = f"{len(value.content)} items" if isinstance(value.content, list) else value.content
    return f"{key!r} of type {value.type_id}: {str(content)[:30]}"


def _change_pairs(rng: random.Random, image: Image) -> str:
    idx = rng.randrange(len(image.pairs))
    key, value = image.pairs[idx]
    kind = rng.choice(("remove", "remove", "rename", "repeat"))
    if kind == "remove":
        del image.pairs[idx]
    elif kind == "rename":
        image.pairs[idx] = (rng.choice((b"", b"general.alignment", b"split.count", key + b"x", b"\xff")), value)
    else:
        image.pairs.append((key, value))
    return f"{kind} {key!r}"


def _change_array(rng: random.Random, image: Image) -> str:
    indices = [
        idx
        for idx, (_, value) in enumerate(image.pairs)
        if value.type_id == _ARRAY and isinstance(value.content, list) and value.content
    ]
    if not indices:
        return "nothing"
    key, value = image.pairs[rng.choice(indices)]
    kind = rng.choice(("count", "item type", "item", "remove item", "repeat item", "shuffle", "empty"))
    idx = rng.randrange(len(value.content))
    if kind == "count":
        value.count = rng.choice(_WIDE)
    elif kind == "item type":
        value.item_type = rng.choice((0, 4, 6, 7, _STRING, _ARRAY, 12, 77))
    elif kind == "item" and value.item_type == _STRING:
        value.content[idx] = Value(_STRING, rng.choice((b"", b" ", b"\xc3", "\u2581".encode() * 9000, b"<s>")))
    elif kind == "item":
        value.content[idx] = Value(value.item_type, rng.choice((0, 1, 5, 77)))
    elif kind == "remove item":
        del value.content[idx]
    elif kind == "repeat item":
        value.content.insert(0, value.content[idx])
    elif kind == "shuffle":
        rng.shuffle(value.content)
    else:
        value.content = []
    return f"{kind} of {key!r}"


def _change_row(rng: random.Random, image: Image) -> str:
    row = rng.choice(image.rows)
    kind = rng.choice(("dims", "dims", "order", "type", "offset", "name"))
    if kind == "dims":
        at = rng.randrange(len(row.dims) + 1)
        row.dims[at : at + rng.randrange(2)] = [rng.choice(_WIDE)] * rng.choice((1, 1, 1, 9))
    elif kind == "order":
        row.dims.reverse()
    elif kind == "type":
        row.type_id = rng.choice((0, 1, 2, 8, 12, 16, 24, 27, 28, 30, 34, 99, (1 << 32) - 1))
    elif kind == "offset":
        row.offset = rng.choice((*_WIDE, row.offset + 1, row.offset + 32))
    else:
        others = (b"", b"blk.0.attn_q.weight", b"blk.99.attn_q.weight", b"blk." + b"9" * 5000 + b".attn_q.weight")
        row.name = rng.choice((*others, b"output.weight", b"rope_freqs.weight", b"x", row.name + b"\xff"))
    return f"{kind} of {row.name[:60]!r}: {row.dims}, {row.type_id}, {row.offset}"


def _change_rows(rng: random.Random, image: Image) -> str:
    idx = rng.randrange(len(image.rows))
    row = image.rows[idx]
    kind = rng.choice(("remove", "repeat", "swap"))
    if kind == "remove":
        del image.rows[idx]
    elif kind == "repeat":
        image.rows.append(row)
    else:
        other = rng.choice(image.rows)
        row.name, other.name = other.name, row.name
    return f"{kind} tensor {row.name!r}"


def _change_counts(rng: random.Random, image: Image) -> str:
    image.counts = [rng.choice((*_WIDE, len(image.rows) - 1)), len(image.pairs)]
    if rng.random() < 0.5:
        image.counts = [len(image.rows), rng.choice((*_WIDE, len(image.pairs) - 1))]
    if rng.random() < 0.2:
        image.version = rng.choice((0, 1, 2, 4, 1 << 31))
    return f"counts {image.counts}, version {image.version}"


_DAMAGES: dict[Callable[[random.Random, Image], str], int] = {
    _change_number: 4,
    _change_type: 1,
    _change_pairs: 2,
    _change_array: 1,
    _change_row: 3,
    _change_rows: 1,
    _change_counts: 1,
}
