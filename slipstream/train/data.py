"""The texts a head learns from: as tensors, in a file, or still to be written by the target."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineOptions
from slipstream.device import open_device
from slipstream.engine.build import build_engine
from slipstream.engine.client import EngineClient
from slipstream.errors import ConfigError
from slipstream.train.author import Advance, Author, Written
from slipstream.train.prompts import form_of, read_prompts
from slipstream.train.settings import TrainSettings, check_same
from slipstream.train.store import read_store, write_store

_RECIPE = 4  # of what is asked and how; texts of another one are another training's


@dataclass(frozen=True)
class Texts:
    """Sequences of token ids, one after another, and what counts in each."""

    token_ids: Tensor  # [total] int32
    starts: Tensor  # [n + 1] int64
    learn_from: Tensor  # [n] int64: the first token whose prediction is learnt
    answer_from: Tensor  # [n] int64: the first token of the answer
    held_out: Tensor  # [n] bool: never learnt from; answered greedily

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    def tokens_of(self, idx: int) -> Tensor:
        return self.token_ids[int(self.starts[idx]) : int(self.starts[idx + 1])]

    def where(self, held_out: bool) -> Tensor:
        return (self.held_out == held_out).nonzero().flatten()


class Source:
    """The texts of some settings: in a file, or still to be written."""

    def __init__(self, settings: TrainSettings, path: Path) -> None:
        self._settings, self._path = settings, path
        self._given = [] if settings.prompts is None else read_prompts(Path(settings.prompts))
        digest = hashlib.sha256(repr(self._given).encode()).hexdigest()
        self._about = settings.of_data() | {"prompts_digest": digest, "recipe": _RECIPE}
        self.seconds: float | None = None  # that writing them took

    def read(self) -> Texts | None:
        if not self._path.exists():
            return None
        tensors, about = read_store(self._path)
        if about.get("recipe") != _RECIPE:
            raise ConfigError(f"{self._path} was written by another version, which asks otherwise; delete it")
        check_same(about, self._about, self._path)
        self.seconds = about.get("seconds")
        return Texts(**tensors)

    def write(self, model_path: Path, say: Callable[[str], None], advance: Advance) -> Texts:
        if len(self._given) > self._settings.sequences:
            say(f"of {len(self._given):,} prompts the first {self._settings.sequences:,} are used (--sequences)")
        begin = time.monotonic()
        texts = _generate(self._settings, model_path, self._given, say, advance)
        self.seconds = round(time.monotonic() - begin, 1)
        write_store(self._path, dict(vars(texts)), self._about | {"seconds": self.seconds})
        return texts


def _generate(
    settings: TrainSettings, model_path: Path, given: list[list[str]], say: Callable[[str], None], advance: Advance
) -> Texts:
    on_gpu = open_device(settings.device).name == "cuda"
    options = EngineOptions(
        model=str(model_path),
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_len,
        max_num_seqs=512 if on_gpu else 32,
        seed=settings.seed,
    )
    client = EngineClient.in_thread(lambda: build_engine(options))
    try:
        form, line = form_of(client.tokenizer)
        if line is not None:
            say(line)
        return _texts_of(Author(client, form, settings, advance).write(given))
    finally:
        client.close()


def _texts_of(written: Sequence[Written]) -> Texts:
    ids, learn_from, answer_from, held_out = zip(*written, strict=True) if written else ((), (), (), ())
    texts = Texts(
        torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int32), *ids])),
        torch.tensor([0, *map(len, ids)]).cumsum(0),
        torch.tensor(learn_from, dtype=torch.int64),
        torch.tensor(answer_from, dtype=torch.int64),
        torch.tensor(held_out, dtype=torch.bool),
    )
    if not len(texts.where(True)) or not len(texts.where(False)):
        raise ConfigError("the target wrote almost nothing; raise --sequences, or give --prompts")
    return texts
