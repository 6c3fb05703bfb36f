"""The command from its options to a head that an engine drafts with."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.sampling_params import SamplingParams
from slipstream.train.data import Texts
from slipstream.train.eagle3 import make_head
from slipstream.train.settings import FORMATS, TrainSettings
from slipstream.train.store import read_store
from slipstream.train.trainer import Trainer, read_checkpoint
from slipstream.train.vocabulary import choose_vocabulary
from tests import tiny_models
from tests.commands.run_cli import RunCli, assert_one_line_error, make_runner
from tests.train.conftest import OPTIONS, arguments, build_target, open_target_model


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCli:
    return make_runner(capsys, monkeypatch)


def curves_of(folder: Path) -> dict[str, Any]:
    curves: dict[str, Any] = json.loads((folder / "training" / "curves.json").read_text())
    return curves


def texts_of(folder: Path) -> Texts:
    return Texts(**read_store(folder / "training" / "data.safetensors")[0])


def restored(target: Path, folder: Path) -> Trainer:
    """The trainer as it was at the end."""
    settings, texts, target_model = (
        TrainSettings(**OPTIONS, model=str(target), out=str(folder)),
        texts_of(folder),
        open_target_model(target, "float32"),
    )
    trained_ids = torch.cat([texts.tokens_of(idx) for idx in texts.where(False).tolist()])
    always = (open_checkpoint(target).tokenizer().eos_token_id or 0,)
    head = make_head(settings, target_model, choose_vocabulary(trained_ids, 272, settings.draft_vocab, always))
    trainer = Trainer(settings, target_model, head, texts, folder / "training" / "checkpoint.safetensors")
    trainer.restore(read_checkpoint(trainer._path, settings))
    return trainer


def test_acceptance_rises(trained: Path) -> None:
    curves = curves_of(trained)
    before, after = curves["acceptance"][0], curves["acceptance"][-1]
    assert before[0] < 0.1
    assert after[0] > 0.5 and after[1] > 0.25
    assert after == sorted(after, reverse=True)
    assert sum(curves["losses"][-10:]) < 0.6 * sum(curves["losses"][:10])
    assert curves["measured_at"] == [0, 50, 100] and len(curves["losses"]) == 100
    assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_generated_texts(target: Path, trained: Path) -> None:
    texts, tokenizer = texts_of(trained), open_checkpoint(target).tokenizer()
    assert len(texts.lengths) > 40 and 1 < len(texts.where(True)) < 10
    assert int(texts.lengths.max()) <= OPTIONS["max_len"]
    assert bool((texts.learn_from <= texts.answer_from).all() and (texts.answer_from < texts.lengths).all())
    starts = [tokenizer.decode(texts.tokens_of(idx).tolist()) for idx in range(len(texts.lengths))]
    assert all(text.startswith("user: ") for text in starts)
    # Held-out texts are the target's own greedy answers.
    target_model = open_target_model(target, "float32")
    for idx in texts.where(True).tolist():
        tokens, start = texts.tokens_of(idx).long(), int(texts.answer_from[idx])
        padded = torch.zeros(1, 224, dtype=torch.int64)
        padded[0, : len(tokens)] = tokens
        greedy = target_model.greedy(target_model.read(padded).normed[0])
        assert torch.equal(greedy[start - 1 : len(tokens) - 1], tokens[start:])


def test_measured_acceptance_equals_a_count_of_chains(target: Path, trained: Path) -> None:
    """Counts the accepted drafts of each chain one by one."""
    trainer, texts = restored(target, trained), texts_of(trained)
    head = trainer.head
    counts, total = [0, 0, 0], 0
    for idx in texts.where(held_out=True).tolist():
        batch = trainer._held_out.make_batch(torch.tensor([idx]))
        hidden = trainer._target.read(batch.token_ids)
        choices = (hidden.normed[0] @ trainer._target.head.T).argmax(dim=-1)
        drafts = head.drafts(hidden.features, batch.token_ids, 3)[0]
        first, length = int(texts.answer_from[idx]), int(texts.lengths[idx])
        for t in range(first - 2, length - 1 - 3):
            total += 1
            for j in range(3):
                if drafts[t, j] != choices[t + 1 + j]:
                    break
                counts[j] += 1
    assert counts[2] > 0
    measured = curves_of(trained)["acceptance"][-1]
    assert measured == pytest.approx([count / total for count in counts], abs=0.01)


@pytest.mark.parametrize("format", FORMATS)
def test_the_engine_accepts_as_many_drafts(format: str, target: Path, trained: Path, tmp_path: Path) -> None:  # noqa: A002
    folder = trained
    if format != "eagle3":  # a finished training can be written again in the other format
        folder = Path(shutil.copytree(trained, tmp_path / "other"))
        from slipstream.cli import main

        assert main(arguments(target, folder, format=format)) == 0
        assert "speculators_model_type" in json.loads((folder / "config.json").read_text())
    texts, expected = texts_of(trained), curves_of(trained)["acceptance"][-1]
    held_out = texts.where(True).tolist()
    prompts = [texts.tokens_of(idx)[: int(texts.answer_from[idx])].tolist() for idx in held_out]
    with LLM(str(target), speculate="eagle3", draft_model=str(folder), k=3, max_num_seqs=8) as llm:
        lengths = [int(texts.lengths[idx] - texts.answer_from[idx]) for idx in held_out]
        greedy = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
        outputs = llm.generate(prompts, greedy)
        counts = llm.stats
        for idx, output in zip(held_out, outputs, strict=True):
            wrote = texts.tokens_of(idx)[int(texts.answer_from[idx]) :].tolist()
            assert output.outputs[0].token_ids[: len(wrote)] == wrote
    assert counts.num_draft_steps > 20
    assert counts.num_accepted_tokens / counts.num_draft_tokens == pytest.approx(sum(expected) / 3, abs=0.15)


def test_every_flag_is_written(trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings"):
        assert config[flag] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    tensors = load_file(trained / "model.safetensors")
    assert tensors["d2t"].dtype is torch.int64 and tensors["t2d"].dtype is torch.bool
    assert tensors["lm_head.weight"].shape == (200, 32) and "embed_tokens.weight" not in tensors


def test_a_training_with_prompts_and_without_a_template(
    cli: RunCli, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path(shutil.copytree(target, tmp_path / "plain"))
    (plain / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    entries = [{"turns": [f"first {i}", "second"]} if i % 2 else {"prompt": f"only {i}"} for i in range(10)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, entries)))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    changes = {"prompts": tmp_path / "p.jsonl", "sequences": 24, "steps": 2, "draft_vocab": 5000, "max_len": 128}
    outcome = cli(*arguments(plain, tmp_path / "out", **changes))
    assert outcome.code == 0, outcome.err
    assert "the model has no chat template" in outcome.err
    assert "needs matplotlib" in outcome.err and not (tmp_path / "out" / "curves.png").exists()
    texts, tokenizer = texts_of(tmp_path / "out"), open_checkpoint(plain).tokenizer()
    prompts = [
        tokenizer.decode(texts.tokens_of(i)[: int(texts.answer_from[i])].tolist()) for i in range(len(texts.lengths))
    ]
    assert prompts[:10] == [(f"first {i}" if i % 2 else f"only {i}") for i in range(10)]
    later = [prompt for prompt in prompts[10:] if prompt.startswith("first") and prompt.endswith("second")]
    assert 1 <= len(later) <= 5
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape[0] == 272


def test_resuming_through_the_command(cli: RunCli, target: Path, trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "again"))
    outcome = cli(*arguments(target, folder))
    assert outcome.code == 0 and "resuming after step 100" in outcome.err
    assert curves_of(folder)["losses"] == curves_of(trained)["losses"]
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert_one_line_error(cli(*arguments(target, folder, lr=0.5)), "--lr 0.01, now it is 0.5", "delete the file")
    outcome = cli(*arguments(target, folder, sequences=65))
    assert_one_line_error(outcome, "data.safetensors was made with --sequences 64, now it is 65")
    for name in ("checkpoint", "data"):
        file = folder / "training" / f"{name}.safetensors"
        file.write_bytes(file.read_bytes()[:-7])
        assert_one_line_error(cli(*arguments(target, folder)), f"{name}.safetensors is damaged", "delete it")


def test_bad_input(cli: RunCli, target: Path, tmp_path: Path) -> None:
    few = tiny_models.save(build_target(6), tmp_path / "few")
    assert_one_line_error(cli(*arguments(few, tmp_path / "out")), "the model has 6 layers", "at least 7")
    (tmp_path / "empty.txt").write_text("\n")
    outcome = cli(*arguments(target, tmp_path / "out", prompts=tmp_path / "empty.txt"))
    assert_one_line_error(outcome, "empty.txt is empty; put a prompt on each line")
    (tmp_path / "file").write_text("")
    assert_one_line_error(cli(*arguments(target, tmp_path / "file" / "out")), "cannot write to --out", "choose another")
    assert_one_line_error(cli(*arguments(target, tmp_path / "out", max_len=600, batch_tokens=600)), "context of 512")
    assert_one_line_error(cli(*arguments(tmp_path / "nowhere", tmp_path / "out")), "nowhere", "check the path")
    assert_one_line_error(cli("train", "eagle3", "--out", tmp_path / "out", "--step", "3"), "did you mean '--steps'?")
    assert_one_line_error(cli("train", "eagle2"), "unknown command 'eagle2'; did you mean 'eagle3'?")
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": ""}, "--out is missing"),
        ({"format": "gguf"}, "--format must be eagle3 or speculators, not 'gguf'"),
        ({"device": "tpu"}, "--device must be auto, cuda or cpu"),
        ({"sequences": 3}, "--sequences must be at least 16"),
        ({"batch_tokens": 100}, r"--batch-tokens must be at least 224 \(--max-len\)"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"minutes": -1.0}, "--minutes must be above 0"),
        ({"lr": float("nan")}, "--lr must be above 0"),
        ({"draft_steps": 99}, "--draft-steps must be at most 16"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSettings(**{**OPTIONS, "out": "x", **changes})


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_curve(target: Path, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    (folder / "training").mkdir(parents=True)
    shutil.copy(trained / "training" / "data.safetensors", folder / "training")
    options = {"checkpoint_every": 10, "steps": 60}
    command = [sys.executable, "-c", "import torch; torch.set_num_threads(1); import slipstream.cli as c; c.main()"]
    command += arguments(target, folder, **options)
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 20,"):
            process.kill()
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (folder / "model.safetensors").exists()
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    whole = tmp_path / "whole"
    (whole / "training").mkdir(parents=True)
    shutil.copy(trained / "training" / "data.safetensors", whole / "training")
    subprocess.run([*command[:3], *arguments(target, whole, **options)], cwd=Path(__file__).parents[2], check=True)
    assert curves_of(folder)["losses"] == curves_of(whole)["losses"] and len(curves_of(whole)["losses"]) == 60
