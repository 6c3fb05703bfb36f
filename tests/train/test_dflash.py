"""DFlash heads: the network in training against the one that drafts, what a training learns, and its files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.models.heads.registry import read_head
from slipstream.sampling_params import SamplingParams
from slipstream.train.block_export import block_config, block_speculators_config, default_block_taps
from slipstream.train.block_head import TrainableBlockHead
from slipstream.train.data import Texts
from slipstream.train.dflash import make_block_head, unused_token
from slipstream.train.settings import BLOCK_FORMATS, BlockSettings
from slipstream.train.store import read_store
from slipstream.train.trainer import Sample
from tests.models.heads.plain_heads import Target
from tests.models.heads.tiny_dflash import PlainBlock
from tests.train.conftest import OPTIONS, open_target_model
from tests.train.test_trainer import random_texts

BLOCK, LAYERS = 3, 2
OWN: dict[str, Any] = {
    **{name: value for name, value in OPTIONS.items() if not name.startswith("draft")},
    "layers": LAYERS,
    "block_size": BLOCK,
    "anchors": 64,
    "lr": 2e-2,
    "steps": 140,
    "checkpoint_every": 70,
}


def arguments(target: Path, out: Path, **changes: Any) -> list[str]:
    options = {"model": target, "out": out, **OWN, **changes}
    return ["train", "dflash", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]


@pytest.fixture(scope="module")
def block_trained(target: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the command, from the texts of another training: they depend on the same settings."""
    out = tmp_path_factory.mktemp("block")
    (out / "training").mkdir()
    shutil.copy(trained / "training" / "data.safetensors", out / "training")
    assert main(arguments(target, out)) == 0
    return out


def curves_of(folder: Path) -> dict[str, Any]:
    curves: dict[str, Any] = json.loads((folder / "training" / "curves.json").read_text())
    return curves


def make_sample(target: Path, texts: Texts) -> tuple[Sample, TrainableBlockHead, Any]:
    """Everything of the texts as one batch, and a head with random weights, in float64."""
    settings = BlockSettings(**OWN, model=str(target), out="x")
    target_model = open_target_model(target, "float64")
    target_model._taps = default_block_taps(target_model.config)
    head = make_block_head(settings, target_model, texts)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    from slipstream.train.batches import Batches

    batch = Batches(texts, False, 4096, BLOCK - 1, 0).make_batch(torch.tensor([1, 2, 3]))
    hidden = target_model.read(batch.token_ids)
    return Sample(batch, batch.token_ids, hidden.features, hidden.normed, target_model.head, 7), head, target_model


def test_a_block_in_training_is_one_that_drafts(target: Path) -> None:
    """Against the plain double of the published layout, at several places of several texts."""
    texts = random_texts(10)
    sample, head, target_model = make_sample(target, texts)
    settings = BlockSettings(**OWN, model=str(target), out="x")
    config = block_config(target_model.config, settings, head.block.mask_id, torch.float64)
    tensors = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    plain = PlainBlock(config, tensors, Target(target_model.embedding, target_model.head, 7))
    anchors = torch.tensor([[3, 7, 5], [0, 9, 1], [8, 2, 4]])
    with torch.no_grad():
        logits = head.states(sample, anchors)[:, :, 1:] @ target_model.head.T
        for row in range(3):
            for idx, anchor in enumerate(anchors[row].tolist()):
                text = sample.token_ids[row, : anchor + 1].tolist()
                expected = plain.propose(text, sample.features[row, :anchor], BLOCK - 1)[1]
                torch.testing.assert_close(logits[row, idx], expected, rtol=1e-9, atol=1e-9)


def test_drafts_are_measured_where_they_begin(target: Path) -> None:
    sample, head, target_model = make_sample(target, random_texts(10))
    length = sample.token_ids.shape[1]
    starts = torch.tensor([3, 8, length + 2, 2 * length + 1, 2 * length + 9])
    with torch.no_grad():
        found = head.drafts_at(sample, starts, BLOCK - 1)
        for i, start in enumerate(starts.tolist()):
            one = sample._replace(
                token_ids=sample.token_ids[start // length :][:1], features=sample.features[start // length :][:1]
            )
            states = head.states(one, torch.tensor([[start % length]]))[0, 0, 1:]
            assert found[:, i].tolist() == (states @ target_model.head.T).argmax(-1).tolist()


def test_the_loss_is_a_sum_over_places(target: Path) -> None:
    """By hand: every block that was drawn, place by place, with weights that fall."""
    sample, head, target_model = make_sample(target, random_texts(10))
    anchors, exist = head._draw_anchors(sample)
    assert torch.equal(anchors, head._draw_anchors(sample)[0]), "drawn from the step's number alone"
    assert not torch.equal(anchors, head._draw_anchors(sample._replace(seed=8))[0])
    total, weights = 0.0, 0.0
    with torch.no_grad():
        states = head.states(sample, anchors)
        for row in range(3):
            for idx, anchor in enumerate(anchors[row].tolist()):
                assert sample.batch.trained[row, anchor] == exist[row, idx]
                for place in range(1, BLOCK):
                    before = anchor + place - 1
                    if not exist[row, idx] or before >= sample.token_ids.shape[1]:
                        continue
                    if not sample.batch.trained[row, before]:
                        continue
                    wanted = (sample.normed[row, before] @ target_model.head.T).softmax(-1)
                    said = (states[row, idx, place] @ target_model.head.T).log_softmax(-1)
                    weight = 2.718281828459045 ** (-(place - 1) / (7 / 16 * BLOCK))
                    total, weights = total - weight * float(wanted @ said), weights + weight
        assert float(head.loss(sample)) == pytest.approx(total / weights, rel=1e-6)


def test_acceptance_rises(block_trained: Path) -> None:
    curves = curves_of(block_trained)
    before, after = curves["acceptance"][0], curves["acceptance"][-1]
    assert before[0] < 0.1
    assert after[0] > 0.5 and len(after) == BLOCK - 1
    assert after == sorted(after, reverse=True)
    assert sum(curves["losses"][-10:]) < 0.6 * sum(curves["losses"][:10])
    text = (block_trained / "README.md").read_text()
    assert text.startswith("# DFlash head for ") and "blocks of 3 in one pass" in text
    assert "--speculate dflash" in text


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_the_engine_accepts_as_many_drafts(format: str, target: Path, block_trained: Path, tmp_path: Path) -> None:  # noqa: A002
    folder = block_trained
    if format != "dflash":  # a finished training can be written again in the other format
        folder = Path(shutil.copytree(block_trained, tmp_path / "other"))
        assert main(arguments(target, folder, format=format)) == 0
        assert "speculators_model_type" in json.loads((folder / "config.json").read_text())
    texts = Texts(**read_store(folder / "training" / "data.safetensors")[0])
    expected = curves_of(folder)["acceptance"][-1]
    held_out = texts.where(True).tolist()
    prompts = [texts.tokens_of(idx)[: int(texts.answer_from[idx])].tolist() for idx in held_out]
    lengths = [int(texts.lengths[idx] - texts.answer_from[idx]) for idx in held_out]
    with LLM(str(target), speculate="dflash", draft_model=str(folder), k=BLOCK - 1, max_num_seqs=8) as llm:
        llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=length) for length in lengths])
        counts = llm.stats
    assert counts.num_draft_steps > 20
    share = counts.num_accepted_tokens / counts.num_draft_tokens
    assert share == pytest.approx(sum(expected) / (BLOCK - 1), abs=0.15)


def test_resuming_gives_the_same_head(target: Path, block_trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    (folder / "training").mkdir(parents=True)
    shutil.copy(block_trained / "training" / "data.safetensors", folder / "training")
    assert main(arguments(target, folder, steps=20, checkpoint_every=10)) == 0
    again = Path(shutil.copytree(folder, tmp_path / "again"))
    (again / "model.safetensors").unlink()
    assert main(arguments(target, again, steps=20, checkpoint_every=10)) == 0
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, again))
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert set(ours) >= {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"}
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(ours)


def test_both_formats_describe_one_network(target: Path) -> None:
    target_model = open_target_model(target)
    settings = BlockSettings(**OWN, model="m", out="x")
    plans = [
        read_head(make(target_model.config, settings, 260, torch.float32), target_model.config, "dflash")
        for make in (block_config, block_speculators_config)
    ]
    plans = [replace(plan, config=replace(plan.config, architecture="")) for plan in plans]
    assert plans[0] == plans[1]
    assert plans[0].taps == (2, 3, 4, 5)
    assert plans[0].block is not None and plans[0].block.max_drafts == BLOCK - 1


def test_the_mask_is_a_token_that_no_text_has() -> None:
    texts = random_texts(5)
    present = {*texts.token_ids.tolist()}
    assert unused_token(texts, 400) == 399
    last = unused_token(texts, 256)
    assert last not in present and {*range(last + 1, 256)} <= present
    with pytest.raises(ConfigError, match="none is left"):
        unused_token(texts, min({*range(256)} - present))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "--block-size must be at least 2"),
        ({"block_size": 18}, "--block-size must be at most 17"),
        ({"layers": 0}, "--layers must be at least 1"),
        ({"format": "eagle3"}, "--format must be dflash or speculators, not 'eagle3'"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockSettings(**{**OWN, "out": "x", **changes})
