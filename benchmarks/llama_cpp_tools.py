"""llama.cpp's tools run as programs, and what they print read as figures. Built by `llama_cpp_build.py`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

_LEAST_CONTEXT = 512


class Rate(NamedTuple):
    """One test of llama-bench: a prompt, or tokens one by one after an empty context."""

    prompt_len: int
    output_len: int
    tok_s: float


class Generated(NamedTuple):
    """A text that a tool has written."""

    num_tokens: int
    seconds: float
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds


class OutputError(Exception):
    """A tool failed, or printed something else than expected."""


def read_bench(text: str) -> list[Rate]:
    """llama-bench's JSON."""
    try:
        return [Rate(int(test["n_prompt"]), int(test["n_gen"]), float(test["avg_ts"])) for test in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise OutputError(f"llama-bench printed no JSON with n_prompt, n_gen and avg_ts: {text[:200]!r}") from error


def read_batched(text: str, batch: int) -> float:
    """Tokens per second of the decode part of a batch: llama-batched-bench's lines of JSON, between lines of a log."""
    for line in text.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            if row["pl"] == batch:
                return float(row["speed_tg"])
    raise OutputError(f"llama-batched-bench printed no line for a batch of {batch}: {text[:200]!r}")


def read_speculative(text: str) -> Generated:
    """What llama-speculative-simple prints after its text."""
    speed = re.search(r"decoded +(\d+) tokens in +([\d.]+) seconds", text)
    drafts, accepted = (re.search(rf"{name} *= *(\d+)", text) for name in ("n_drafted", "n_accept"))
    if speed is None or drafts is None or accepted is None:
        raise OutputError(f"llama-speculative-simple printed no figures: {text[-200:]!r}")
    return Generated(int(speed[1]), float(speed[2]), int(drafts[1]), int(accepted[1]))


def read_completion(text: str) -> Generated:
    """What llama-completion prints of the tokens after the first one, which came from the prompt's pass."""
    speed = re.search(r"(?<!prompt )eval time = +([\d.]+) ms / +(\d+) runs", text)
    if speed is None:
        raise OutputError(f"llama-completion printed no figures: {text[-200:]!r}")
    return Generated(int(speed[2]), float(speed[1]) / 1000)


class LlamaCpp:
    """Each call is a process of its own that loads the file, warms up and measures once."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder, self._threads = folder, threads

    def bench(self, model: Path, prompt_len: int, output_len: int) -> Rate:
        """Of a prompt, or of a decode: one of the two lengths is 0."""
        options = ["-p", prompt_len, "-n", output_len, "-r", 1, "-o", "json"]
        for rate in read_bench(self._run("llama-bench", model, *options)):
            if (rate.prompt_len, rate.output_len) == (prompt_len, output_len):
                return rate
        raise OutputError(f"llama-bench left out the test of {prompt_len} and {output_len} tokens")

    def batched(self, model: Path, batch: int, prompt_len: int, output_len: int) -> float:
        context = batch * (prompt_len + output_len)
        lengths = ["-npp", prompt_len, "-ntg", output_len, "-npl", batch, "-c", max(_LEAST_CONTEXT, context)]
        return read_batched(self._run("llama-batched-bench", model, *lengths, "--output-format", "jsonl"), batch)

    def complete(self, model: Path, prompt: str, output_len: int) -> Generated:
        """Without drafts, greedy, to the end of the text."""
        options = [*self._text(prompt, output_len), "-no-cnv", "--perf"]
        return read_completion(self._run("llama-completion", model, *options))

    def speculate(self, model: Path, prompt: str, output_len: int, drafting: list[str]) -> Generated:
        """With drafts, greedy, to the end of the text; ``drafting`` are the tool's own options."""
        return read_speculative(
            self._run("llama-speculative-simple", model, *self._text(prompt, output_len), *drafting)
        )

    def _text(self, prompt: str, output_len: int) -> list[object]:
        # A character is at least as long as a token is rare: room for the prompt without counting its tokens.
        context = max(_LEAST_CONTEXT, len(prompt) + output_len + 64)
        return ["-p", prompt, "-n", output_len, "-c", context, "-b", context, "--temp", 0]

    def _run(self, tool: str, model: Path, *options: object) -> str:
        command = [self._folder / tool, "-m", model, "-t", self._threads, *options]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise OutputError(f"{tool} ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
        # The speculative tools write their figures to the log.
        return done.stdout if tool.endswith("bench") else done.stdout + done.stderr
