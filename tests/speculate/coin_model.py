"""A model whose distribution is known: that of a token depends on the state it is drawn in, which the last token gives.

So a whole engine, with its real drafter, rows, checks and noise, can be held to that distribution, token by token. With
one state tokens are independent draws from one distribution. With several, drafts that follow each other are drawn from
different ones, so that mixed-up positions are found too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from slipstream.attention.backend import AttentionBackend
from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.backends.triton import TritonBackend
from slipstream.attention.choice import open_caches
from slipstream.attention.context import AttentionContext
from slipstream.attention.groups import CacheGroups
from slipstream.config import DraftModel, EngineOptions, ModelConfig, RopeConfig
from slipstream.device import open_device
from slipstream.engine.core import EngineCore
from slipstream.engine.resolve import resolve
from slipstream.kernels.request_rows import RowState
from slipstream.models.model_state import ModelState
from slipstream.models.source_encoder import SourceEncoder
from slipstream.runner.runner import Runner
from slipstream.scheduler.scheduler import Scheduler
from slipstream.speculate.autoregressive import AutoRegressiveSpeculator
from slipstream.speculate.draft_model import DraftModelSpeculator
from slipstream.speculate.eagle import EagleSpeculator
from slipstream.speculate.rejection import DRAFT_NOISE
from tests.engine.drive import make_request, run

VOCAB_SIZE = 512
TEMPERATURE = 0.8
NUM_DRAFTS = 3
_PROMPT = [1] * 9
_CONFIG = ModelConfig("coin", VOCAB_SIZE, 2, 2, 1, 1, 1, 16, 1e-5, 4096, RopeConfig(rotary_dim=2), dtype="float32")


class CoinModel:
    state: ModelState | None = None
    source_encoder: SourceEncoder | None = None
    pooled_head = None

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits  # [num_states, vocab]

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        hidden = _hidden_of(input_ids)
        context.tap(_CONFIG.num_layers, hidden)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._logits.index_select(0, hidden[:, 0].long() % len(self._logits))


class CoinHead(CoinModel):
    """A head in the manner of EAGLE-3, which knows some of the tokens only."""

    taps = (_CONFIG.num_layers,)

    def __init__(self, logits: Tensor, target_ids: Tensor) -> None:
        super().__init__(logits[:, target_ids])
        self.config = replace(_CONFIG, vocab_size=len(target_ids))
        self.target_ids: Tensor | None = target_ids.int()

    def combine(self, features: Tensor) -> Tensor:
        return features

    def forward(  # type: ignore[override]
        self, module_idx: int, input_ids: Tensor, hidden: Tensor, context: AttentionContext
    ) -> Tensor:
        return _hidden_of(input_ids)


def _hidden_of(input_ids: Tensor) -> Tensor:
    """The token itself, which float32 holds exactly."""
    return input_ids.float().unsqueeze(1).repeat(1, _CONFIG.hidden_size)


def make_logits(dtype: torch.dtype, num_states: int = 1) -> tuple[Tensor, Tensor]:
    """[num_states, vocab]: the target's and the drafter's, which is about right."""
    made, shape = torch.Generator().manual_seed(0), (num_states, VOCAB_SIZE)
    target = (2.0 * torch.randn(shape, generator=made)).to(dtype)
    return target, (target.float() + torch.randn(shape, generator=made)).to(dtype)


def likely_ids(dtype: torch.dtype, size: int, num_states: int = 1) -> Tensor:
    """Tokens of a reduced draft vocabulary: most of the likely ones, and some that are not."""
    target, _ = make_logits(dtype, num_states)
    liked = target.float().amax(0) + 2.0 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    return liked.topk(size).indices.sort().values


def make_core(
    device_name: str,
    dtype: torch.dtype,
    num_rows: int,
    purpose: int = DRAFT_NOISE,
    draft_ids: Tensor | None = None,  # given: a head over these tokens drafts, else a draft model over all
    num_states: int = 1,
) -> EngineCore:
    device = open_device(device_name)
    options = EngineOptions(
        device=device_name,
        dtype="float32",
        max_num_seqs=num_rows,
        # A chunk leaves one token of each prompt, after which drafts are proposed before anything is sampled.
        max_num_batched_tokens=max(num_rows * 8, 512),
        long_prefill_token_threshold=8,
        num_gpu_blocks_override=num_rows * 40,
        enable_prefix_caching=False,
        steps_in_flight=2,
        speculative_config={
            "method": "draft_model" if draft_ids is None else "eagle3",
            "model": "a coin",
            "num_speculative_tokens": NUM_DRAFTS,
            "verify": "rejection",
        },
    )
    target_logits, draft_logits = (logits.to(device.torch_device) for logits in make_logits(dtype, num_states))
    head = None if draft_ids is None else CoinHead(draft_logits, draft_ids.to(device.torch_device))
    draft = DraftModel(_CONFIG if head is None else head.config)
    config = resolve(options, device.hardware("float32"), _CONFIG, draft=draft)
    backend: AttentionBackend = TritonBackend() if device_name == "cuda" else ReferenceBackend()

    def make_speculator(rows: RowState, _: CacheGroups) -> AutoRegressiveSpeculator:
        drafter: AutoRegressiveSpeculator
        own = open_caches(config, draft.config, device, attention=backend)
        if head is None:
            drafter = DraftModelSpeculator(config, device, CoinModel(draft_logits), own, rows)
        else:
            drafter = EagleSpeculator(config, device, head, own, rows)
        drafter._purpose = purpose
        return drafter

    with device.sync_guard.allow("build"):
        caches = open_caches(config, _CONFIG, device, attention=backend)
        runner = Runner(config, device, CoinModel(target_logits), caches, make_speculator)
    return EngineCore(Scheduler(config.scheduler, config.cache), runner, config.steps_in_flight)


def expected_acceptance(dtype: torch.dtype, draft_ids: Tensor) -> float:
    """The share of drafts that speculative sampling accepts, where there is one state: each is accepted with what the
    two distributions have in common."""
    target, draft = (logits[0].double() / TEMPERATURE for logits in make_logits(dtype))
    draft_probs = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    draft_probs[draft_ids] = draft[draft_ids].softmax(0)
    common = float(torch.minimum(target.softmax(0), draft_probs).sum())
    # A draft is accepted if it and all before it are.
    return sum(common**i for i in range(1, NUM_DRAFTS + 1)) / NUM_DRAFTS


def sigmas_off(
    core: EngineCore, dtype: torch.dtype, num_tokens: int, num_rows: int, num_states: int = 1, num_greedy: int = 0
) -> float:
    """Run requests until so many tokens are drawn; how far the counts are from the target's distributions.

    Of every batch the first ``num_greedy`` requests are greedy, and not counted.
    """
    output_len = 60
    counts = torch.zeros(num_states * VOCAB_SIZE, dtype=torch.int64)
    seed = 0
    while int(counts.sum()) < num_tokens:
        requests = [
            make_request(
                *(f"r{seed + i}", _PROMPT, output_len), seed=seed + i, temperature=TEMPERATURE * (i >= num_greedy)
            )
            for i in range(num_rows)
        ]
        seed += num_rows
        for outcome in [*run(core, requests).values()][num_greedy:]:
            before, drawn = torch.tensor([_PROMPT[-1], *outcome.token_ids[:-1]]), torch.tensor(outcome.token_ids)
            counts += torch.bincount(before % num_states * VOCAB_SIZE + drawn, minlength=len(counts))
    parts = [
        _chi_square(of_state, logits)
        for of_state, logits in zip(counts.view(num_states, -1), make_logits(dtype, num_states)[0], strict=True)
    ]
    chi_square, degrees = (sum(part) for part in zip(*parts, strict=True))
    return (chi_square - degrees) / (2 * degrees) ** 0.5


def _chi_square(counts: Tensor, logits: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom, of the tokens that were drawn in one state."""
    expected = (logits.double() / TEMPERATURE).softmax(0) * counts.sum()
    order = expected.argsort(descending=True)
    counts, expected = counts[order].double(), expected[order]
    # The rare ones are one bin, so that every bin expects enough.
    num_kept = int((expected >= 20).sum())
    counts = torch.cat([counts[:num_kept], counts[num_kept:].sum().unsqueeze(0)])
    expected = torch.cat([expected[:num_kept], expected[num_kept:].sum().unsqueeze(0)])
    return float(((counts - expected) ** 2 / expected).sum()), num_kept
