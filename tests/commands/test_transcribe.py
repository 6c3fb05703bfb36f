"""``slipstream transcribe``: files in, transcripts out, with a tiny model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from slipstream import LLM, TranscriptionOptions
from slipstream.cli import main
from slipstream.transcription.writers import WRITERS
from tests.audio.sounds import JFK
from tests.transcription import tiny_whisper

soundfile = pytest.importorskip("soundfile")
ONE_TRY = partial(TranscriptionOptions, temperatures=(0.0,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    tiny_whisper.save_ctranslate2(folder, tiny_whisper.make_model())
    return folder


@pytest.fixture(autouse=True)
def _no_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tokens are always improbable."""
    monkeypatch.setattr("slipstream.transcription.options.TranscriptionOptions", ONE_TRY)


def run(*words: str, model: Path) -> int:
    return main(["transcribe", *words, "--model", str(model), "--language", "de", "--seed", "1"])


def test_standard_output(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(JFK), "--format", "verbose_json", model=model) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["language"] == "german" and found["duration"] == 11.0
    assert all(segment["no_speech_prob"] is not None for segment in found["segments"])


@pytest.mark.parametrize(("output_format", "suffix"), [("srt", ".srt"), ("text", ".txt")])
def test_files(
    model: Path, tmp_path: Path, output_format: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several at a time, each into a file of its own, as ``LLM.transcribe`` would have it."""
    other = tmp_path / "other.wav"
    samples, rate = soundfile.read(JFK)
    soundfile.write(other, samples[: 3 * rate], rate)
    out = tmp_path / "out"
    words = (str(JFK), str(other), "--translate", "--format", output_format, "--output-dir", str(out), "--prompt", "Ah")
    assert run(*words, "--batched", model=model) == 0
    assert sorted(path.name for path in out.iterdir()) == [f"jfk{suffix}", f"other{suffix}"]
    assert capsys.readouterr().out == ""
    options = ONE_TRY(language="de", task="translate", prompt="Ah", batched=True)
    with LLM(str(model), seed=1, max_num_seqs=8) as llm:
        wanted = llm.transcribe(JFK, options)[0]
    assert (out / f"jfk{suffix}").read_text(encoding="utf-8") == WRITERS[output_format](wanted)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere.wav"], "there is no sound file at nowhere.wav; check the path"),
        ([str(JFK), "--format", "str"], "--format str is unknown; did you mean 'srt'?"),
        ([str(JFK), str(JFK), "--output-dir", "out"], "would both be written to out/jfk.txt"),
        ([__file__], "test_transcribe.py is no sound file that can be read"),
    ],
)
def test_refusals(
    words: list[str],
    reason: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words, model=model) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
