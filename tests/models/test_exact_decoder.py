"""Whole networks in exact mode, through the kernels of a GPU: however a text is cut into passes, the same to the bit.

Logits, and every key and value that a pass leaves for the ones after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.attention.backends.triton import ExactTritonBackend
from slipstream.attention.context import StepTokens
from slipstream.attention.grouped_query import serve_layers
from slipstream.attention.metadata import CommonAttentionMetadata
from slipstream.config import ModelConfig, RopeConfig
from slipstream.experts_config import ExpertsConfig, Routing
from slipstream.kernels import triton_jit
from slipstream.kernels.attention import exact_attention, latent_parts
from slipstream.models.decoder import Decoder
from slipstream.models.load import Placement, built_under, randomize_weights
from slipstream.models.registry import architecture_of
from tests.kernels.order_revealing import products_along_k

pytestmark = pytest.mark.skipif(not triton_jit.is_available(), reason="there is no Triton here")
PAGE_SIZE, NUM_TOKENS = 4, 14
DENSE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=50,
    hidden_size=96,  # two parts of a product
    intermediate_size=48,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=64,
    rope=RopeConfig(rotary_dim=16),
    tie_embeddings=True,
)
EXPERTS = replace(
    DENSE,
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    tie_embeddings=False,
    experts=ExpertsConfig(num_experts=4, intermediate_size=32, routing=Routing(2, renormalise=True), layer_ids=(0, 1)),
)
LADDER = ((8, 1), (128, 1 << 18))  # so that the text has two parts of keys


def make_network(config: ModelConfig) -> Decoder:
    architecture = architecture_of({"architectures": [config.architecture]})
    with built_under(Placement(torch.device("cpu"), torch.float16)):
        network = architecture(config, config.max_position)
        randomize_weights(network)
        for parameter in network.parameters():
            parameter.mul_(4.0)
    network.finish_weights()
    network.keep_exact()
    return network


class Text(NamedTuple):
    """A text whose keys and values are computed pass by pass."""

    network: Decoder
    ids: Tensor
    caches: list[Tensor]

    @classmethod
    def begin(cls, network: Decoder, ids: Tensor) -> Text:
        config = network.config
        shape = (NUM_TOKENS // PAGE_SIZE + 3, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        return cls(network, ids, [torch.zeros(shape, dtype=torch.float16) for _ in range(config.num_layers)])

    def compute(self, first: int, end: int) -> Tensor:
        """The logits of these positions, after those before have been computed."""
        count, starts = end - first, np.array([0, end - first], dtype=np.int32)
        positions = torch.arange(first, end)
        common = CommonAttentionMetadata(
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_cpu=starts,
            query_lens=torch.tensor([count], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            seq_lens_cpu_upper_bound=np.array([end], dtype=np.int32),
            block_table=torch.arange(1, NUM_TOKENS // PAGE_SIZE + 2, dtype=torch.int32).unsqueeze(0),
            slot_mapping=positions + PAGE_SIZE,
            batch_rows=torch.zeros(1, dtype=torch.int32),
        )
        backend = ExactTritonBackend()
        context = serve_layers(backend, self.caches).begin(StepTokens(positions, common.slot_mapping, common))
        return self.network.compute_logits(self.network(self.ids[first:end].int(), context))


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@torch.inference_mode()
def test_a_text_does_not_depend_on_its_passes(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (exact_attention, latent_parts):
        monkeypatch.setattr(target, "LADDER", LADDER)
    ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,))
    with products_along_k():
        network = make_network(config)
        whole = Text.begin(network, ids)
        expected = whole.compute(0, NUM_TOKENS)
        assert len({tuple(row.tolist()) for row in expected}) == NUM_TOKENS and expected.isfinite().all()
        text, first, made = Text.begin(network, ids), 0, []
        for end in (4, 10, 11, NUM_TOKENS):  # a prompt in chunks, a decode, a verification
            made.append(text.compute(first, end))
            first = end
        assert torch.equal(torch.cat(made), expected)
        for own, other in zip(text.caches, whole.caches, strict=True):
            assert torch.equal(own, other)
