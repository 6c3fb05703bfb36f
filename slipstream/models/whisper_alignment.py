"""Where a Whisper model's decoder looks while it reads a text: the weights of its cross attention.

One pass over a whole text, with plain operations and without caches. The engine's attention kernels never have weights
in memory, so this is a path of its own, for the times of words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.elementwise.gelu import gelu
from slipstream.models.whisper import DecoderAttention, DecoderLayer, Whisper


@torch.inference_mode()
def cross_weights(
    model: Whisper,
    features: Tensor,  # [num_bins, num_frames]
    token_ids: Tensor,  # [num_tokens]: the text as the decoder reads it, its first tokens included
    heads: Sequence[tuple[int, int]],  # layers, and heads of them
    num_entries: int,  # of the encoder's output, from the first on: no weight is given to the padding after a sound
) -> Tensor:  # [num_heads, num_tokens, num_entries] float32, each row summing to one
    encoded, decoder = model.model.encoder(features), model.model.decoder
    x = decoder.embed_tokens(token_ids) + decoder.embed_positions.weight[: token_ids.shape[0]]
    found: dict[tuple[int, int], Tensor] = {}
    for idx in range(max(layer for layer, _ in heads) + 1):  # layers after that change none of the weights
        layer = cast(DecoderLayer, decoder.layers[idx])
        x = x + _attend_to_text(layer.self_attn, layer.self_attn_layer_norm(x))
        cross = layer.encoder_attn
        keys_and_values = cross.encode(encoded)
        keys, values = (part.transpose(0, 1) for part in keys_and_values[1:])
        queries = cross.q_proj(layer.encoder_attn_layer_norm(x))
        queries = queries.view(x.shape[0], -1, cross.layer.head_dim).transpose(0, 1)
        for own in heads:
            if own[0] == idx:
                scores = queries[own[1]] @ keys[own[1], :num_entries].t() * cross.layer.scale
                found[own] = torch.softmax(scores, dim=-1, dtype=torch.float32)
        mixed = F.scaled_dot_product_attention(queries[None], keys[None], values[None], scale=cross.layer.scale)
        x = x + cross.out_proj(mixed[0].transpose(0, 1).flatten(1))
        x = x + layer.fc2(gelu(layer.fc1(layer.final_layer_norm(x)), False))
    return torch.stack([found[own] for own in heads])


def _attend_to_text(attention: DecoderAttention, x: Tensor) -> Tensor:
    heads = attention.qkv_proj(x).view(x.shape[0], 3, -1, attention.layer.head_dim)
    q, k, v = (part.transpose(0, 1)[None] for part in heads.unbind(1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.layer.scale)
    out: Tensor = attention.out_proj(mixed[0].transpose(0, 1).flatten(1))
    return out
