"""The trainer: batches, optimiser steps, acceptance on held-out texts, checkpoints.

Nothing in it is random: weights come from the seed, batches from seed and step. A resumed training therefore equals one
that was never stopped; on a GPU up to rounding, where free memory decides how the hidden states are batched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.train.batches import Batch, Batches
from slipstream.train.data import Texts
from slipstream.train.hidden_state_cache import HiddenStateCache, to_device
from slipstream.train.settings import CommonSettings, check_same
from slipstream.train.store import read_store, write_store
from slipstream.train.target import TargetModel
from slipstream.train.text_generation import OnCount

_WARM_UP, _LOWEST = 0.04, 0.02  # share of the training; share of the highest learning rate
_BETAS, _DECAY, _MAX_NORM = (0.9, 0.95), 0.01, 1.0
_READ_EVERY = 10  # steps on a GPU between reads of the loss, each of which synchronises


class Sample(NamedTuple):
    """A batch with the target's states, on the device of the training."""

    batch: Batch  # on the host
    token_ids: Tensor  # [rows, length] int64
    features: Tensor  # [rows, length, taps * hidden], in the type of the products
    normed: Tensor  # [rows, length, hidden]: the input of the target's logits
    matrix: Tensor  # [draft_vocab, hidden]: their weight, for the tokens that can be drafted
    seed: int  # of what is drawn for this batch


class Trainable(Protocol):
    """A head in training: a module whose parameters are trained."""

    target_ids: Tensor  # [draft_vocab] int64: the target's id of each token that it drafts
    measured_every: int  # of the places where drafts could begin, that acceptance is measured at

    def loss(self, sample: Sample) -> Tensor: ...

    def drafts_at(self, sample: Sample, starts: Tensor, num_drafts: int) -> Tensor:
        """[num_drafts, n] greedy drafts, as ids of the target, after the tokens at these indices of the batch."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


OnProgress = Callable[["Progress", float], None]


@dataclass
class Progress:
    """How far a training has come, and the curves so far."""

    step: int = 0
    elapsed_s: float = 0.0
    losses: list[float] = field(default_factory=list)  # of each step
    measured_at: list[int] = field(default_factory=list)  # steps
    acceptance: list[list[float]] = field(default_factory=list)  # at these steps, by draft position


Stored = tuple[dict[str, Tensor], Progress]


def read_checkpoint(path: Path, settings: CommonSettings) -> Stored:
    """Refuses one that is damaged or was made with other settings."""
    tensors, about = read_store(path)
    check_same(about["settings"], settings.training_settings(), path)
    return tensors, Progress(**about["progress"])


class Trainer:
    def __init__(
        self, settings: CommonSettings, target_model: TargetModel, head: Trainable, texts: Texts, checkpoint: Path
    ) -> None:
        self._settings, self._target, self.head, self._path = settings, target_model, head, checkpoint
        sizes = (settings.batch_tokens, settings.num_drafts, settings.seed)
        self._batches, self._held_out = (Batches(texts, held_out, *sizes) for held_out in (False, True))
        self._cache, self._num_tokens = HiddenStateCache(target_model), len(texts.token_ids)
        # Products in 16 bits where the target has 16; weights and their updates are float32 at least.
        narrow = target_model.dtype in (torch.bfloat16, torch.float16)
        self._compute = torch.bfloat16 if narrow else target_model.dtype
        self._draft_matrix = target_model.head[head.target_ids].to(self._compute)
        matrices = [parameter for parameter in head.parameters() if parameter.dim() > 1]
        gains = [parameter for parameter in head.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": _DECAY}, {"params": gains, "weight_decay": 0.0}]
        fused = target_model.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=_BETAS, fused=fused)
        self.progress = Progress()

    def fill_cache(self, on_count: OnCount) -> None:
        """Compute all hidden states once, where they fit and texts are used more than once."""
        steps = self._settings.max_steps
        if self._cache.fits(self._num_tokens) and (steps is None or steps > self._batches.num_per_epoch):
            self._cache.fill((self._batches, self._held_out), self._num_tokens, on_count)

    def run(self, on_progress: OnProgress = lambda _progress, _share: None) -> Progress:
        progress, settings = self.progress, self._settings
        unread: list[Tensor] = []
        began = time.monotonic() - progress.elapsed_s
        if not progress.measured_at:
            self._measure()
        while (share := self._share()) < 1.0:
            unread.append(self.train_step(share))
            progress.step += 1
            last = settings.max_steps is not None and progress.step >= settings.max_steps
            due = progress.step % settings.checkpoint_every == 0 or last
            if due or len(unread) >= (_READ_EVERY if self._target.device.type == "cuda" else 1):
                self._read_losses(unread)
            progress.elapsed_s = time.monotonic() - began
            if due:
                self._measure()
                self.save()
            if not unread:
                on_progress(progress, self._share())
        self._read_losses(unread)
        if progress.measured_at[-1] != progress.step:
            self._measure()
            self.save()
        return progress

    def _read_losses(self, unread: list[Tensor]) -> None:
        """Copy pending losses to the host; waits for them."""
        read = torch.stack(unread).tolist() if unread else []
        if not all(map(math.isfinite, read)):
            raise ConfigError(f"the loss is no longer a number near step {self.progress.step}; lower --lr")
        self.progress.losses += read
        unread.clear()

    def _share(self) -> float:
        """Fraction of the training that is done: by steps or by time, whichever is further."""
        steps, minutes, progress = self._settings.max_steps, self._settings.minutes, self.progress
        by_steps = 0.0 if steps is None else progress.step / steps
        return max(by_steps, 0.0 if minutes is None else progress.elapsed_s / (60 * minutes))

    def train_step(self, share: float) -> Tensor:
        """One optimiser step; the returned loss is not synchronised."""
        batch = self._batches.at(self.progress.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr * learning_rate_at(share)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.compute_loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), _MAX_NORM)
        self._optimizer.step()
        return loss.detach()

    def compute_loss(self, batch: Batch) -> Tensor:
        with self._narrow():
            return self.head.loss(self._sample(batch, self.progress.step))

    def _sample(self, batch: Batch, seed: int) -> Sample:
        hidden, token_ids = self._cache.get(batch), to_device(batch.token_ids, self._target.device)
        features = hidden.features.to(self._compute)
        return Sample(batch, token_ids, features, hidden.normed, self._draft_matrix, seed)

    def _narrow(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._target.device.type, torch.bfloat16, enabled=self._compute is torch.bfloat16)

    def _measure(self) -> None:
        self.progress.measured_at.append(self.progress.step)
        self.progress.acceptance.append(self.measure())

    @torch.no_grad()
    def measure(self) -> list[float]:
        """By draft position j, the share of held-out positions where drafts 0 to j equal the target's greedy tokens."""
        num_drafts = self._settings.num_drafts
        counts, total = torch.zeros(num_drafts, dtype=torch.int64), 0
        for batch in self._held_out.in_order():
            hits = self._hits(batch)
            total += hits.shape[1]
            counts += hits.cumprod(dim=0).sum(dim=1).cpu()
        return [count / max(1, total) for count in counts.tolist()]

    def _hits(self, batch: Batch) -> Tensor:
        """[num_drafts, n]: for every chain of drafts, which are the target's greedy tokens."""
        device, num_drafts = self._target.device, self._settings.num_drafts
        answered = batch.answered.flatten()
        # A run of answer positions never spans two rows, since the last position of a row is never one.
        whole = answered.clone()
        for step in range(1, num_drafts):
            whole &= torch.cat([answered[step:], answered.new_zeros(step)])
        starts = whole.nonzero().flatten()[:: self.head.measured_every].to(device)
        sample = self._sample(batch, 0)
        choices = torch.full((answered.numel(),), -1, device=device)
        where = answered.nonzero().flatten().to(device)
        choices[where] = self._target.greedy(sample.normed.flatten(0, 1)[where])
        with self._narrow():
            drafts = self.head.drafts_at(sample, starts, num_drafts)
        steps = torch.arange(num_drafts, device=device).unsqueeze(1)
        return (drafts == choices[starts + steps]).long()

    def save(self) -> None:
        tensors: dict[str, Tensor] = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        for name, parameter in self.head.named_parameters():
            state = self._optimizer.state[parameter]
            tensors |= {f"{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq", "step")}
        tensors["target_ids"] = self.head.target_ids
        write_store(
            self._path, tensors, {"settings": self._settings.training_settings(), "progress": vars(self.progress)}
        )

    def restore(self, stored: Stored) -> None:
        """Resume from the checkpoint."""
        tensors, self.progress = stored
        if not torch.equal(tensors["target_ids"], self.head.target_ids.cpu()):
            raise ConfigError(f"{self._path} was made from different texts; delete it and run the command again")
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                parameter.copy_(tensors[f"head.{name}"])
                own = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step")}
                self._optimizer.state[parameter] = {
                    key: _on_device(key, value, parameter) for key, value in own.items()
                }


def _on_device(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    """Where the optimiser keeps it: the step count is on the host, unless the update is fused."""
    return value.clone() if key == "step" and parameter.device.type != "cuda" else value.to(parameter.device, copy=True)


def learning_rate_at(share: float) -> float:
    """The learning rate at a fraction of the training, relative to the highest."""
    if share < _WARM_UP:
        return max(share / _WARM_UP, 0.01)
    return _LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP)))
