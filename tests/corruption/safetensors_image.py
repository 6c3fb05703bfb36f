"""Damage to a safetensors file: its header as JSON, and files that are whole but hold other tensors."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.corruption.json_documents import EXTREMES, damage_json, write

_WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "I16": 2}
_Tensor = tuple[str, list[int], bytes]  # type, shape, data


def damage_safetensors(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """The file after damage, and what was done."""
    header_len = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + header_len].decode(), content[8 + header_len :]
    kind = rng.choice(("header", "header", "length", "names", "tensors", "tensors"))
    if kind == "length":
        count = rng.choice([value for value in EXTREMES if isinstance(value, int) and 0 <= value < 1 << 64])
        return count.to_bytes(8, "little") + content[8:], f"header of {count} bytes"
    if kind == "header":
        damaged, note = damage_json(rng, header)
        return _join(damaged, data), note
    tensors: dict[str, _Tensor] = {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    }
    name = rng.choice(list(tensors))
    if kind == "names":
        far = ("model.layers.99.x", "model.layers." + "9" * 5000 + ".x", "lm_head.weight")
        new = rng.choice((rng.choice(list(tensors)), f"{name}x", "", *far))
        return _join(header.replace(json.dumps(name), json.dumps(new)), data), f"{name} is called {new[:60]}"
    note = _change_tensor(rng, tensors, name)
    return write_safetensors(tensors), note


def _join(header: str, data: bytes) -> bytes:
    encoded = header.encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def _change_tensor(rng: random.Random, tensors: dict[str, _Tensor], name: str) -> str:
    """One tensor is gone, new, or has another shape, type or content; the package finds nothing wrong with the file."""
    dtype, shape, own = tensors[name]
    kind = rng.choice(("remove", "add", "shape", "type", "values", "scalar"))
    if kind == "remove":
        del tensors[name]
    elif kind == "add":
        tensors[rng.choice(("x", f"{name}.x", "model.layers.7.input_layernorm.weight", "d2t"))] = ("F32", [2], bytes(8))
    elif kind == "shape":
        tensors[name] = (dtype, rng.choice((shape[::-1], [1, *shape], [*shape, 1], [len(own) // 4])), own)
    elif kind == "type":
        same = [other for other, width in _WIDTHS.items() if width == _WIDTHS[dtype] and other != dtype]
        tensors[name] = (rng.choice(same), shape, own)
    elif kind == "values":  # in floating point all of them are no number, or zero
        tensors[name] = (dtype, shape, rng.choice((b"\xff", b"\x00")) * len(own))
    else:
        tensors[name] = ("F32", [], bytes(4))
    return f"{kind} of {name}: {tensors.get(name, ('',))[:2]}"


def write_safetensors(tensors: dict[str, _Tensor]) -> bytes:
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    return _join(write(header), b"".join(data for _, _, data in tensors.values()))
