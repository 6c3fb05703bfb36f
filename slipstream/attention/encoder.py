"""Layers of encoders: a text's tokens attend to each other in one pass, and nothing is kept of them.

Since every token attends to all of its text, a text is never computed in chunks, and a step is never cut within one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from slipstream.attention.backend import Caps
from slipstream.attention.context import StepTokens
from slipstream.cache_spec import CacheSpec
from slipstream.kernels.attention.encoder_attention import Texts, encoder_attention


@dataclass(frozen=True)
class EncoderSpec(CacheSpec):
    """Such a layer has no page and no state."""

    drafter_refusal: ClassVar[str] = "encodes texts and generates none"
    whole_prompts: ClassVar[str] = "every token of a text attends to all others, so a text is computed in one pass"

    def open(self, setting: Any) -> EncoderBackend:
        return EncoderBackend()


class EncoderLayer(NamedTuple):
    """The fixed properties of one layer of a model."""

    idx: int
    scale: float


class EncoderHeads(NamedTuple):
    """The output of a layer's projection for the tokens: [num_tokens, num_heads, head_dim] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # [num_heads, 2 * span - 1]: added to scores by the key's distance from the query


class EncoderBackend:
    caps: ClassVar[Caps] = Caps(
        dtypes=("float64", "float32", "bfloat16", "float16"), host_lengths="none", graph_support="always"
    )

    def step_buffers(self) -> tuple[Tensor, ...]:
        return ()

    def begin(self, tokens: StepTokens, shared: Any = None) -> EncoderStep:
        assert tokens.common is not None, "tokens without a batch have nothing to attend to"
        return EncoderStep(Texts(tokens.common.query_start_loc, tokens.common.query_lens))

    def can_share(self, other: Any) -> bool:
        return False

    def adapt(self, shared: Mapping[str, Any], seq_starts: Tensor) -> NoReturn:
        raise RuntimeError("an encoder keeps no keys for a drafter")


@dataclass(slots=True)
class EncoderStep:
    """One pass over the layers."""

    texts: Texts
    shared: None = None
    is_recorded: bool = True  # every length is read on the device

    def run(self, layer: EncoderLayer, inputs: EncoderHeads) -> Tensor:
        return encoder_attention(inputs.q, inputs.k, inputs.v, self.texts, layer.scale, inputs.bias)

    def make_output(self, inputs: EncoderHeads) -> Tensor:
        return torch.zeros(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)
