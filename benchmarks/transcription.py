"""Transcribing on a CPU in float32: Slipstream against faster-whisper in one run, and with drafts against without.

Recordings are made by espeak-ng, and one of a speech may be given. Every engine lives in a process of its own with the
same number of threads, greedy, at one temperature. For each recording they take turns, and ratios are of turns beside
each other: the speed of a shared machine drifts. No engine sees a recording twice, for one that keeps the encoder's
output would not compute it again: a round of the same speech is a little quieter than the one before.

Prints and writes real-time factors (seconds of work a second of sound), ratios, and whether texts are the same.

    python benchmarks/transcription.py FOLDER [--speech jfk.flac] [--recordings 50] [--rounds 5]
        [--drafts ngram early_exit] [--no-peer]

FOLDER holds Whisper in CTranslate2's format, which both read.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

TEXT = Path(__file__).parent / "perplexity_text.txt"
PEER, BASE = "faster-whisper", "slipstream"
VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-us+f3", "en-gb+m5")
WORDS_A_MINUTE = (130, 150, 170)
MIN_RATIO = 1.0

Transcribe = Callable[[str], str]


def make_slipstream(folder: str, threads: int, drafts: str | None) -> Transcribe:
    import torch

    from slipstream import LLM, TranscriptionOptions

    torch.set_num_threads(threads)
    options = TranscriptionOptions(language="en", temperatures=(0.0,))
    llm = LLM(folder, dtype="float32", max_num_seqs=1, speculate=drafts or "none")
    return lambda file: llm.transcribe(file, options)[0].text


def make_peer(folder: str, threads: int, _drafts: str | None) -> Transcribe:
    from faster_whisper import WhisperModel

    model = WhisperModel(folder, device="cpu", compute_type="float32", cpu_threads=threads)

    def transcribe(file: str) -> str:
        segments, _ = model.transcribe(file, language="en", beam_size=1, temperature=0.0)
        return "".join(segment.text for segment in segments).strip()

    return transcribe


def serve(name: str, folder: str, threads: int) -> None:
    """The child's side: load the model, then answer each file with its time and its text."""
    make = make_peer if name == PEER else make_slipstream
    transcribe = make(folder, threads, name.partition("+")[2] or None)
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        text = transcribe(line.rstrip("\n"))
        print(json.dumps({"seconds": time.perf_counter() - start, "text": text}), flush=True)


class Worker:
    """The parent's side."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        command = [sys.executable, __file__, str(folder), "--worker", name, "--threads", str(threads)]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self._read()

    def __call__(self, file: Path) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{file}\n")
        self._child.stdin.flush()
        found: dict[str, Any] = json.loads(self._read())
        return found

    def _read(self) -> str:
        assert self._child.stdout is not None
        if not (line := self._child.stdout.readline()):
            raise SystemExit("an engine ended; run it alone with --worker to see why")
        return line

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def make_recordings(folder: Path, count: int) -> list[Path]:
    """Two sentences each, by several voices at several speeds."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("recordings are made by espeak-ng; install it, or give --recordings 0")
    text = " ".join(TEXT.read_text(encoding="utf-8").split())
    sentences = [one for one in re.findall(r"[A-Z][^.!?]{30,160}[.!?]", text) if one.isascii()]
    files = []
    for i in range(count):
        file = folder / f"recording-{i:02d}.wav"
        spoken = " ".join(sentences[(2 * i + j) % len(sentences)] for j in range(2))
        voice, speed = VOICES[i % len(VOICES)], WORDS_A_MINUTE[i % len(WORDS_A_MINUTE)]
        command = ["espeak-ng", "-v", voice, "-s", str(speed), "-w", str(file), spoken]
        subprocess.run(command, check=True, capture_output=True)
        files.append(file)
    return files


def make_rounds(folder: Path, speech: Path, count: int) -> list[Path]:
    """The same speech, each time a thousandth quieter."""
    import soundfile

    samples, rate = soundfile.read(speech, dtype="float32")
    files = []
    for i in range(count):
        files.append(folder / f"speech-{i:02d}.wav")
        soundfile.write(files[-1], samples * (0.999 - 0.001 * i), rate)
    return files


def compare(workers: dict[str, Worker], files: Sequence[Path], case: str) -> list[dict[str, Any]]:
    """A row for each engine; the first of the files is a warm-up."""
    import soundfile

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for i, file in enumerate(files):
        for name, worker in workers.items():
            runs[name].append(worker(file))
        times = ", ".join(f"{name} {own[-1]['seconds']:.2f} s" for name, own in runs.items())
        print(f"{case} {i + 1}/{len(files)}: {times}", file=sys.stderr)
    timed = range(min(1, len(files) - 1), len(files))
    duration = [soundfile.info(file).duration for file in files]
    rows = []
    for name, own in runs.items():
        base = runs[BASE]
        row = {"case": case, "batch": 1, "engine": name, "recordings": len(timed)}
        row["real_time_factor"] = round(sum(own[i]["seconds"] for i in timed) / sum(duration[i] for i in timed), 4)
        row["speed_against_slipstream"] = round(median(base[i]["seconds"] / own[i]["seconds"] for i in timed), 3)
        row["same_text_as_slipstream"] = sum(a["text"] == b["text"] for a, b in zip(own, base, strict=True))
        row["of_texts"] = len(files)
        rows.append(row)
    return rows


def report(row: dict[str, Any]) -> None:
    same = f"{row['same_text_as_slipstream']} of {row['of_texts']} texts the same"
    print(
        f"{row['case']}, {row['engine']}: real-time factor {row['real_time_factor']:.3f}, "
        f"{row['speed_against_slipstream']:.2f} x slipstream without drafts, {same}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--speech", type=Path)
    parser.add_argument("--recordings", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", nargs="*", default=["ngram", "early_exit"])
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()

    from slipstream.commands.machine import num_cores
    from slipstream.commands.results import collect_results, prepare_folder, write_results

    threads = options.threads or num_cores()
    if options.worker:
        serve(options.worker, str(options.folder), threads)
        return 0
    prepare_folder(options.output_dir)
    names = [BASE, *([] if options.no_peer else [PEER]), *(f"{BASE}+{drafts}" for drafts in options.drafts)]
    workers = {name: Worker(name, options.folder, threads) for name in names}
    rows = []
    with tempfile.TemporaryDirectory() as made:
        if options.speech is not None:
            rows += compare(workers, make_rounds(Path(made), options.speech, options.rounds + 1), options.speech.name)
        if options.recordings:
            rows += compare(workers, make_recordings(Path(made), options.recordings), "recordings")
    for worker in workers.values():
        worker.close()
    shared: dict[str, Any] = {"model": options.folder.name, "threads": threads, "dtype": "float32"}
    if not options.no_peer:
        shared["faster_whisper"] = importlib.metadata.version("faster-whisper")
    for row in rows:
        row |= shared
        report(row)
    path = write_results(collect_results(rows, device="cpu"), options.output_dir, "transcription")
    print(f"written to {path}")
    peer = [1 / row["speed_against_slipstream"] for row in rows if row["engine"] == PEER]
    return 0 if all(ratio >= MIN_RATIO for ratio in peer) else 1


if __name__ == "__main__":
    sys.exit(main())
