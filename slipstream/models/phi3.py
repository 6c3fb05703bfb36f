"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with joined projections in the checkpoint, a window, and longrope."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoints.hf_config import read_decoder_config, same_window
from slipstream.config import ModelConfig
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.models.decoder import Decoder


class Phi3(Decoder):
    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf)
        return read_decoder_config(_with_longrope(fields), windows=same_window(fields))

    def translate(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        c = self.config
        joined = {
            "qkv_proj": {
                "q_proj": c.num_heads * c.head_dim,
                "k_proj": c.num_kv_heads * c.head_dim,
                "v_proj": c.num_kv_heads * c.head_dim,
            },
            "gate_up_proj": {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size},
        }
        prefix, _, suffix = name.rpartition(".")
        stem, _, kind = prefix.rpartition(".")
        if (parts := joined.get(kind)) is None:
            return super().translate(name, tensor)
        num_rows = tensor.shape[0] if tensor.ndim else 0
        if num_rows != sum(parts.values()):
            raise ModelError(f"tensor '{name}' has {num_rows} rows, the config says {sum(parts.values())}")
        pieces = torch.split(tensor, list(parts.values()))
        return [(f"{stem}.{part}.{suffix}", piece) for part, piece in zip(parts, pieces, strict=True)]


def _with_longrope(fields: Fields) -> Fields:
    """Early configs call this scaling ``su`` or ``yarn``, but it is longrope."""
    scaling = fields.section("rope_scaling")
    if (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
        return fields.changed(rope_scaling={**scaling, "rope_type": "longrope"})
    return fields
