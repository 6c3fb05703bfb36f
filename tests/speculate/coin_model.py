"""A model that says the same at every position: tokens of a request are independent draws from one distribution.

So a whole engine, with its real drafter, rows, checks and noise, can be held to that distribution, token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.attention.backend import AttentionBackend, AttentionContext
from slipstream.attention.reference import ReferenceBackend
from slipstream.attention.triton import TritonBackend
from slipstream.config import DraftModel, EngineOptions, ModelConfig, RopeConfig, resolve
from slipstream.device import open_device
from slipstream.engine.core import EngineCore
from slipstream.runner.runner import Runner
from slipstream.scheduler.scheduler import Scheduler
from slipstream.speculate.draft_model import DraftModelSpeculator
from slipstream.speculate.rejection import DRAFT_NOISE
from tests.engine.drive import make_request, run

VOCAB_SIZE = 512
_CONFIG = ModelConfig("coin", VOCAB_SIZE, 2, 2, 1, 1, 1, 16, 1e-5, 4096, RopeConfig(rotary_dim=2), dtype="float32")


class CoinModel:
    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        return input_ids.float().unsqueeze(1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._logits.expand(hidden.shape[0], -1).contiguous()


def make_logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The target's and the drafter's, which is about right."""
    made = torch.Generator().manual_seed(0)
    target = (2.0 * torch.randn(VOCAB_SIZE, generator=made)).to(dtype)
    return target, (target.float() + torch.randn(VOCAB_SIZE, generator=made)).to(dtype)


def make_core(device_name: str, dtype: torch.dtype, num_rows: int, purpose: int = DRAFT_NOISE) -> EngineCore:
    device = open_device(device_name)
    options = EngineOptions(
        device=device_name,
        dtype="float32",
        max_num_seqs=num_rows,
        # A chunk leaves one token of each prompt, which is drafted behind before anything is drawn.
        max_num_batched_tokens=max(num_rows * 8, 512),
        long_prefill_token_threshold=8,
        num_gpu_blocks_override=num_rows * 40,
        enable_prefix_caching=False,
        steps_in_flight=2,
        speculative_config={
            "method": "draft_model",
            "model": "a coin",
            "num_speculative_tokens": 3,
            "verify": "rejection",
        },
    )
    config = resolve(options, device.hardware("float32"), _CONFIG, draft=DraftModel(_CONFIG))
    target, draft = (CoinModel(logits.to(device.torch_device)) for logits in make_logits(dtype))
    backend: AttentionBackend = TritonBackend() if device_name == "cuda" else ReferenceBackend()

    def make_speculator(rows: object) -> DraftModelSpeculator:
        drafter = DraftModelSpeculator(config, device, draft, backend, rows)  # type: ignore[arg-type]
        drafter._purpose = purpose
        return drafter

    with device.sync_guard.allow("build"):
        runner = Runner(config, device, target, backend, make_speculator)
    return EngineCore(Scheduler(config.scheduler, config.cache), runner, config.steps_in_flight)


def sigmas_off(core: EngineCore, dtype: torch.dtype, num_tokens: int, num_rows: int) -> float:
    """Run requests until so many tokens are drawn; how far the counts are from the target's distribution."""
    output_len, temperature = 60, 0.8
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    seed = 0
    while int(counts.sum()) < num_tokens:
        requests = [
            make_request(f"r{seed + i}", [1] * 9, output_len, seed=seed + i, temperature=temperature)
            for i in range(num_rows)
        ]
        seed += num_rows
        for outcome in run(core, requests).values():
            counts += torch.bincount(torch.tensor(outcome.token_ids), minlength=VOCAB_SIZE)
    expected = (make_logits(dtype)[0].double() / temperature).softmax(0) * counts.sum()
    order = expected.argsort(descending=True)
    counts, expected = counts[order].double(), expected[order]
    # The rare ones are one bin, so that every bin expects enough.
    num_kept = int((expected >= 20).sum())
    counts = torch.cat([counts[:num_kept], counts[num_kept:].sum().unsqueeze(0)])
    expected = torch.cat([expected[:num_kept], expected[num_kept:].sum().unsqueeze(0)])
    chi_square, degrees = float(((counts - expected) ** 2 / expected).sum()), num_kept
    return (chi_square - degrees) / (2 * degrees) ** 0.5
