"""Order of texts, learning rate, acceptance, and resuming."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.train.batches import Batches
from slipstream.train.data import Texts
from slipstream.train.eagle3 import make_head
from slipstream.train.hidden_state_cache import HiddenStateCache
from slipstream.train.settings import TrainSettings
from slipstream.train.store import read_store, write_store
from slipstream.train.trainer import Progress, Trainer, learning_rate_at, read_checkpoint
from slipstream.train.vocabulary import choose_vocabulary
from tests.train.conftest import OPTIONS, open_target_model


def random_texts(count: int, seed: int = 0) -> Texts:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(12, 60, (count,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    token_ids = torch.randint(0, 256, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
    return Texts(token_ids, starts, lengths // 4, lengths // 2, torch.arange(count) % 5 == 0)


def test_every_epoch_has_every_text_once_and_no_batch_is_too_large() -> None:
    texts = random_texts(80)
    batches = Batches(texts, False, 256, 3, seed=1)
    seen: list[tuple[int, ...]] = []
    step = 0
    while len(seen) < 3 * 64:
        batch = batches.at(step)
        assert batch.token_ids.numel() <= 256
        seen += [tuple(row.tolist()) for row in batch.token_ids]
        step += 1
    rows = [sorted(tuple(filter(None, row)) for row in seen[i : i + 64]) for i in (0, 64, 128)]
    assert rows[0] == rows[1] == rows[2]
    assert seen[:64] != seen[64:128]
    again = Batches(texts, False, 256, 3, seed=1)
    assert torch.equal(again.at(step - 1).token_ids, batches.at(step - 1).token_ids)
    assert torch.equal(again.at(0).token_ids, batches.at(0).token_ids)


def test_what_counts_in_a_batch() -> None:
    texts = random_texts(10)
    batch = Batches(texts, False, 4096, 3, seed=0).make_batch(torch.tensor([1, 2, 3]))
    for row, idx in enumerate((1, 2, 3)):
        tokens, length = texts.tokens_of(idx), int(texts.lengths[idx])
        assert batch.token_ids[row, :length].tolist() == tokens.tolist()
        trained = [i for i in range(batch.token_ids.shape[1]) if batch.trained[row, i]]
        assert trained == list(range(max(4, int(texts.learn_from[idx])) - 1, length - 1))
        assert batch.answered[row].nonzero()[0] == max(4, int(texts.answer_from[idx])) - 1


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate_at(i / 1000) for i in range(1001)]
    top = rates.index(max(rates))
    assert top == 40 and math.isclose(rates[top], 1.0)
    assert rates[:41] == sorted(rates[:41]) and rates[40:] == sorted(rates[40:], reverse=True)
    assert 0 < rates[0] < 0.05 and rates[-1] < 0.05


def make_trainer(target: Path, texts: Texts, checkpoint: Path, dtype: str = "float32", **changes: Any) -> Trainer:
    options = {**OPTIONS, "steps": 10, "checkpoint_every": 4, "batch_tokens": 512, **changes}
    settings = TrainSettings(**options, model=str(target), out=str(checkpoint.parent))
    target_model = open_target_model(target, dtype)
    vocabulary = choose_vocabulary(texts.token_ids, target_model.config.vocab_size, settings.draft_vocab)
    return Trainer(settings, target_model, make_head(settings, target_model, vocabulary), texts, checkpoint)


def test_cached_hidden_states_equal_computed_ones(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = random_texts(40)
    counts: list[tuple[str, int, int]] = []
    computed, cached = (
        make_trainer(target, texts, tmp_path / name, "float64", steps=40) for name in ("computed", "cached")
    )
    monkeypatch.setattr(HiddenStateCache, "fits", lambda _self, num_tokens: num_tokens == len(texts.token_ids))
    few = make_trainer(target, texts, tmp_path / "few", "float64", steps=2)
    few.fill_cache(lambda *_: pytest.fail("two steps use no text twice"))
    cached.fill_cache(lambda *line: counts.append(line))
    assert counts[-1][1:] == (len(texts.token_ids), len(texts.token_ids))
    monkeypatch.setattr(cached._target, "read", lambda _ids: pytest.fail("all states are cached"))
    for trainer in (computed, cached):
        trainer.run()
    assert cached.progress.losses == pytest.approx(computed.progress.losses, rel=1e-9)
    assert cached.progress.acceptance == computed.progress.acceptance


def restore(trainer: Trainer) -> None:
    trainer.restore(read_checkpoint(trainer._path, trainer._settings))


class KilledError(Exception):
    pass


def test_a_killed_training_resumes_to_the_same_curve(target: Path, tmp_path: Path) -> None:
    texts = random_texts(40)
    whole = make_trainer(target, texts, tmp_path / "whole")
    whole.run()

    def kill(progress: Progress, share: float) -> None:
        assert share == progress.step / 10
        if progress.step == 7:
            raise KilledError

    with pytest.raises(KilledError):
        make_trainer(target, texts, tmp_path / "killed").run(kill)
    later = make_trainer(target, texts, tmp_path / "killed")
    restore(later)
    assert later.progress.step == 4
    later.run()
    assert later.progress.losses == whole.progress.losses and len(whole.progress.losses) == 10
    assert later.progress.acceptance == whole.progress.acceptance
    assert later.progress.measured_at == [0, 4, 8, 10]
    for mine, theirs in zip(later.head.parameters(), whole.head.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_minutes_end_a_training(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock of the training alone: other threads of this process read the real one.
    readings = itertools.count()
    monkeypatch.setattr("slipstream.train.trainer.time", SimpleNamespace(monotonic=lambda: 10.0 * next(readings)))
    trainer = make_trainer(target, random_texts(20), tmp_path / "c", steps=None, minutes=1.0)
    trainer.run()
    assert trainer.progress.step == 6, "steps of ten seconds"
    later = make_trainer(target, random_texts(20), tmp_path / "c", steps=None, minutes=1.0)
    restore(later)
    assert later.run().step == 6


def test_a_store_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.safetensors"
    write_store(path, {"x": torch.arange(3)}, {"n": 1})

    def fail(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(Path, "replace", fail)
        write_store(path, {"x": torch.arange(4)}, {"n": 2})
    tensors, about = read_store(path)
    assert tensors["x"].tolist() == [0, 1, 2] and about == {"n": 1}


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "other"])
def test_a_damaged_store_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "store.safetensors"
    write_store(path, {"x": torch.arange(300)}, {"n": 1})
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[-100] ^= 1
        path.write_bytes(content)
    elif damage == "text":
        path.write_text("not a safetensors file")
    else:
        from safetensors.torch import save_file

        save_file({"x": torch.arange(3)}, path)
    with pytest.raises(ConfigError, match=r"store\.safetensors is damaged .* delete it"):
        read_store(path)


def test_other_settings_do_not_resume(target: Path, tmp_path: Path) -> None:
    texts = random_texts(20)
    trainer = make_trainer(target, texts, tmp_path / "c", steps=1)
    trainer.run()
    with pytest.raises(ConfigError, match=r"was made with --lr 0.01, now it is 0.02; use the same settings"):
        restore(make_trainer(target, texts, tmp_path / "c", steps=1, lr=0.02))
    # Where the result goes is another matter.
    shutil.copy(tmp_path / "c", tmp_path / "d")
    restore(make_trainer(target, texts, tmp_path / "d", steps=1, format="speculators"))


def test_a_loss_that_is_no_number_ends_the_training(target: Path, tmp_path: Path) -> None:
    trainer = make_trainer(target, random_texts(20), tmp_path / "c")
    with torch.no_grad():
        trainer.head.fc.weight[0, 0] = torch.inf
    with pytest.raises(ConfigError, match="no longer a number near step 1; lower --lr"):
        trainer.run()
    assert not (tmp_path / "c").exists(), "nothing is kept of it"
