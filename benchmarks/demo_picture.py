"""Draw what ``slipstream demo`` shows in a terminal, for the README: docs/demo.svg.

python benchmarks/demo_picture.py [--prompt "..."] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
PROMPT = "What is the capital of France, and what is it known for?"
WIDTH = 92
ERASED = "\x1b[2K"  # ends what is taken away again: bars of progress


def answer(prompt: str, max_tokens: int) -> str:
    """As a terminal gets it, colours included."""
    command = [sys.executable, "-m", "slipstream", "demo", prompt, "--max-tokens", str(max_tokens)]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    shown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    return shown.rpartition(ERASED)[2]


def draw(shown: str) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print("$ make demo", style="bold green")
    console.print(Text.from_ansi(shown.rstrip()))
    picture = console.export_svg(title="slipstream")
    # Fonts from the net would be fetched by every viewer of the page.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    return picture.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "demo.svg")
    options = parser.parse_args()
    options.out.write_text(draw(answer(options.prompt, options.max_tokens)), encoding="utf-8")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
