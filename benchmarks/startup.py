"""From the start of a process to the first token: with empty kernel caches, and again with the caches that left.

python benchmarks/startup.py [--model smollm2-135m] [--rounds 2]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGETS = {"cold": 45.0, "warm": 15.0}
SCRIPT = """
import sys
from slipstream import LLM, SamplingParams
llm = LLM(sys.argv[1])
print(llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=1))[0].text, flush=True)
sys.stdin.read()
"""


def first_token_s(model: str, environment: dict[str, str]) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-c", SCRIPT, model]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        process.communicate("")
    if not line.strip():
        raise SystemExit("the process ended without a token")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=2, help="warm starts; the first start is cold")
    options = parser.parse_args()
    reached = True
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        for kind in ("cold", *["warm"] * options.rounds):
            seconds = first_token_s(options.model, environment)
            reached &= seconds < TARGETS[kind]
            print(f"{kind}: {seconds:.1f} s to the first token (below {TARGETS[kind]:g})", flush=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
