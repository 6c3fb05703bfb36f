"""The training loop: batches in, steps of the optimiser, acceptance on held-out texts, checkpoints.

Nothing in it is random: weights come from the seed, batches from seed and step. So a run that goes on from a checkpoint
is the run that was never stopped; on a GPU up to rounding, where memory decides when the target reads its texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.train.author import Advance
from slipstream.train.batches import Batch, Batches
from slipstream.train.data import Texts
from slipstream.train.head import TrainableHead
from slipstream.train.lessons import Lessons, sent
from slipstream.train.loss import soft_cross_entropy, target_distribution
from slipstream.train.settings import TrainSettings, check_same
from slipstream.train.store import read_store, write_store
from slipstream.train.teacher import Teacher

_STEP_WEIGHT = 0.8  # what a draft step counts, relative to the one before
_WARM_UP, _LOWEST = 0.04, 0.02  # share of the training; share of the highest learning rate
_BETAS, _DECAY, _MAX_NORM = (0.9, 0.95), 0.01, 1.0
_READ_EVERY = 10  # steps on a GPU between looks at the loss, each of which waits for it
_CHUNK = 8192  # rows of logits at a time

OnProgress = Callable[["Progress", float], None]


@dataclass
class Progress:
    """Where a training stands, and the curves so far."""

    step: int = 0
    elapsed_s: float = 0.0
    losses: list[float] = field(default_factory=list)  # of each step
    measured_at: list[int] = field(default_factory=list)  # steps
    acceptance: list[list[float]] = field(default_factory=list)  # there, by position of the draft


Stored = tuple[dict[str, Tensor], Progress]


def read_checkpoint(path: Path, settings: TrainSettings) -> Stored:
    """Refuses one that is damaged or was made with other settings."""
    tensors, about = read_store(path)
    check_same(about["settings"], settings.of_training(), path)
    return tensors, Progress(**about["progress"])


class Trainer:
    def __init__(
        self, settings: TrainSettings, teacher: Teacher, head: TrainableHead, texts: Texts, checkpoint: Path
    ) -> None:
        self._settings, self._teacher, self._head, self._path = settings, teacher, head, checkpoint
        sizes = (settings.batch_tokens, settings.draft_steps, settings.seed)
        self._batches, self._held_out = (Batches(texts, held_out, *sizes) for held_out in (False, True))
        self._lessons, self._num_tokens = Lessons(teacher), len(texts.token_ids)
        # Products in 16 bits where the target has 16; weights and their updates are float32 at least.
        narrow = teacher.dtype in (torch.bfloat16, torch.float16)
        self._compute = torch.bfloat16 if narrow else teacher.dtype
        self._draft_matrix = teacher.head[head.target_ids].to(self._compute)
        matrices = [parameter for parameter in head.parameters() if parameter.dim() > 1]
        gains = [parameter for parameter in head.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": _DECAY}, {"params": gains, "weight_decay": 0.0}]
        fused = teacher.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=_BETAS, fused=fused)
        self.progress = Progress()

    def keep_lessons(self, advance: Advance) -> None:
        """Let the target read all texts once and for all, where they fit and are learnt from more than once."""
        steps = self._settings.max_steps
        if self._lessons.fit(self._num_tokens) and (steps is None or steps > self._batches.num_an_epoch):
            self._lessons.keep((self._batches, self._held_out), self._num_tokens, advance)

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
            if due or len(unread) >= (_READ_EVERY if self._teacher.device.type == "cuda" else 1):
                self._take(unread)
            progress.elapsed_s = time.monotonic() - began
            if due:
                self._measure()
                self.save()
            if not unread:
                on_progress(progress, self._share())
        self._take(unread)
        if progress.measured_at[-1] != progress.step:
            self._measure()
            self.save()
        return progress

    def _take(self, unread: list[Tensor]) -> None:
        """Read losses that are on their way; waits for them."""
        read = torch.stack(unread).tolist() if unread else []
        if not all(map(math.isfinite, read)):
            raise ConfigError(f"the loss is no longer a number near step {self.progress.step}; lower --lr")
        self.progress.losses += read
        unread.clear()

    def _share(self) -> float:
        """How much of the training is done: by steps or by time, whichever is further."""
        steps, minutes, progress = self._settings.max_steps, self._settings.minutes, self.progress
        by_steps = 0.0 if steps is None else progress.step / steps
        return max(by_steps, 0.0 if minutes is None else progress.elapsed_s / (60 * minutes))

    def train_step(self, share: float) -> Tensor:
        """One step of the optimiser; the loss is still on its way."""
        batch = self._batches.at(self.progress.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr * rate_at(share)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), _MAX_NORM)
        self._optimizer.step()
        return loss.detach()

    def loss_of(self, batch: Batch) -> Tensor:
        head, place, num_steps = self._head, self._teacher.device, self._settings.draft_steps
        # Found on the host: on the device this would have to wait for it.
        rows = sent(batch.learnt.flatten().nonzero().flatten(), place)
        token_ids = sent(batch.token_ids, place)
        lesson = self._lessons.of(batch)
        normed = lesson.normed.flatten(0, 1).index_select(0, rows).to(self._compute)
        target = target_distribution(normed, self._draft_matrix)
        loss, total = torch.zeros((), device=place), 0.0
        with self._narrow():
            for step, states in enumerate(head.states(self._features(lesson.features), token_ids, num_steps)):
                own = head.norm(states.flatten(0, 1).index_select(0, rows - 1 - step))
                weight = _STEP_WEIGHT**step
                loss, total = loss + weight * soft_cross_entropy(own, head.lm_head.weight, target), total + weight
        return loss / total

    def _features(self, features: Tensor) -> Tensor:
        return features.to(self._compute)

    def _narrow(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._teacher.device.type, torch.bfloat16, enabled=self._compute is torch.bfloat16)

    def _measure(self) -> None:
        self.progress.measured_at.append(self.progress.step)
        self.progress.acceptance.append(self.measure())

    @torch.no_grad()
    def measure(self) -> list[float]:
        """By position j, the share of held-out indices at which the drafts 0 to j all are the target's own choice."""
        num_steps = self._settings.draft_steps
        counts, total = torch.zeros(num_steps, dtype=torch.int64), 0
        for batch in self._held_out.in_order():
            starts, hits = self._hits(batch)
            total += len(starts)
            counts += hits.cumprod(dim=0).sum(dim=1).cpu()
        return [count / max(1, total) for count in counts.tolist()]

    def _hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The first position of each chain, and for each step whether its draft is what the target would say."""
        head, place, num_steps = self._head, self._teacher.device, self._settings.draft_steps
        answered = batch.answered.flatten()
        # A run of positions that count is of one text, for the last of each row never does.
        whole = answered.clone()
        for step in range(1, num_steps):
            whole &= torch.cat([answered[step:], answered.new_zeros(step)])
        starts = whole.nonzero().flatten().to(place)
        token_ids = batch.token_ids.to(place)
        lesson = self._lessons.of(batch)
        choices = torch.full((answered.numel(),), -1, device=place)
        where = answered.nonzero().flatten().to(place)
        choices[where] = self._teacher.greedy(lesson.normed.flatten(0, 1)[where])
        hits = torch.empty(num_steps, len(starts), dtype=torch.int64, device=place)
        with self._narrow():
            for step, states in enumerate(head.states(self._features(lesson.features), token_ids, num_steps)):
                picked = states.flatten(0, 1)[starts - 1]
                for begin in range(0, len(starts), _CHUNK):
                    part = slice(begin, begin + _CHUNK)
                    drafts = head.target_ids[head.lm_head(head.norm(picked[part])).argmax(dim=-1)]
                    hits[step, part] = (drafts == choices[starts[part] + step]).long()
        return starts, hits

    def save(self) -> None:
        tensors: dict[str, Tensor] = {f"head.{name}": parameter for name, parameter in self._head.named_parameters()}
        for name, parameter in self._head.named_parameters():
            state = self._optimizer.state[parameter]
            tensors |= {f"{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq", "step")}
        tensors["target_ids"] = self._head.target_ids
        write_store(self._path, tensors, {"settings": self._settings.of_training(), "progress": vars(self.progress)})

    def restore(self, stored: Stored) -> None:
        """Go on where the checkpoint was written."""
        tensors, self.progress = stored
        if not torch.equal(tensors["target_ids"], self._head.target_ids.cpu()):
            raise ConfigError(f"{self._path} was made from other texts; delete it and run the command again")
        with torch.no_grad():
            for name, parameter in self._head.named_parameters():
                parameter.copy_(tensors[f"head.{name}"])
                own = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step")}
                self._optimizer.state[parameter] = {key: _placed(key, value, parameter) for key, value in own.items()}


def _placed(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    """As the optimiser keeps it: the number of steps stays on the host, unless the update is fused."""
    return value.clone() if key == "step" and parameter.device.type != "cuda" else value.to(parameter.device, copy=True)


def rate_at(share: float) -> float:
    """The learning rate over the training, as a share of the highest."""
    if share < _WARM_UP:
        return max(share / _WARM_UP, 0.01)
    return _LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP)))
