"""Slipstream on a CPU in a process of its own, which is asked for one measurement at a time.

The process is what memory is read from, so it holds one engine and nothing else. Questions and answers are lines of
JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 4


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs for the engine's options; a value is JSON where it can be, else text."""
    options: dict[str, Any] = {}
    for pair in given:
        name, _, value = pair.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


class Engine:
    """The parent's end. ``threads`` holds for torch and for Slipstream's own kernels, which ask torch."""

    def __init__(self, options: dict[str, Any], threads: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.ready = self._read()

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"an engine died with exit code {self._child.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def memory_of(status: str) -> dict[str, int]:
    """Bytes out of /proc/PID/status: resident now, at most so far, and of that what is no file's."""
    names = {"VmRSS": "rss_bytes", "VmHWM": "peak_rss_bytes", "RssAnon": "anonymous_bytes"}
    found = re.findall(r"^(\w+):\s+(\d+) kB$", status, flags=re.MULTILINE)
    return {names[name]: 1024 * int(size) for name, size in found if name in names}


class _Answers:
    """The child's end."""

    def __init__(self, options: dict[str, Any]) -> None:
        from slipstream.checkpoints.hub import with_shipped_head
        from slipstream.config import EngineOptions
        from slipstream.engine.build import build_engine
        from slipstream.engine.client import EngineClient
        from slipstream.engine.find_models import resolve_models

        before = self.memory()
        chosen = EngineOptions.from_dict({"device": "cpu", "enable_prefix_caching": False, "seed": 0, **options})
        chosen = resolve_models(with_shipped_head(chosen, by_default=False))
        self._client = EngineClient.in_thread(lambda: build_engine(chosen))
        self._vocab_size = self._client.config.model.vocab_size
        self.decode(1, 1, WARM_UP_TOKENS)
        self.ready = {"without_model_bytes": before.get("rss_bytes")}

    def close(self) -> None:
        self._client.close()

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        rng = random.Random(0)
        return [[rng.randrange(self._vocab_size) for _ in range(length)] for _ in range(batch)]

    def prompt(self, length: int) -> dict[str, Any]:
        """Tokens of a prompt over the time to the first token after it."""
        from slipstream.commands.measure import run_batch

        return {"tok_s": length / run_batch(self._client, self._prompts(1, length), 1).first_token_s}

    def decode(self, batch: int, context: int, output_len: int) -> dict[str, Any]:
        """After random prompts; the first token comes from the prompt's pass and is not counted."""
        from slipstream.commands.measure import decode_rate, run_batch

        return {"tok_s": decode_rate(run_batch(self._client, self._prompts(batch, context), output_len + 1).arrivals)}

    def answer(self, text: str, output_len: int) -> dict[str, Any]:
        """One question to its end: tokens after the first one, and their seconds."""
        from slipstream.commands.measure import run_batch

        token_ids = self._client.tokenizer.encode_chat([{"role": "user", "content": text}])
        run = run_batch(self._client, [token_ids], output_len, ignore_eos=False)
        first, last = run.arrivals[0], run.arrivals[-1]
        return {
            "num_tokens": sum(arrival.num_tokens for arrival in run.arrivals) - first.num_tokens,
            "seconds": last.time - first.time,
            "num_drafts": run.drafts.num_drafts,
            "num_accepted": run.drafts.num_accepted,
            "token_ids": run.token_ids[0],
        }

    def chat(self, text: str) -> dict[str, Any]:
        """The text that a model is given for a question, special tokens spelled out."""
        tokenizer = self._client.tokenizer
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        return {"text": tokenizer.decode(ids, skip_special_tokens=False)}

    def memory(self) -> dict[str, Any]:
        status = Path("/proc/self/status")
        return dict(memory_of(status.read_text())) if status.exists() else {}

    def cache(self) -> dict[str, Any]:
        """Bytes of the pages that keys and values are kept in."""
        from slipstream.cache_spec import page_bytes

        config = self._client.config
        of_a_page = page_bytes(config.model.cache_specs, config.cache.page_size, config.dtype)
        return {"cache_bytes": config.cache.num_pages * of_a_page}


def serve(options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and closes this
    answers = _Answers(options)
    print(json.dumps(answers.ready), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(getattr(answers, question.pop("what"))(**question)), flush=True)
    answers.close()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
