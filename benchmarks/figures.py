"""What every part of the generated pages is made of: numbers, tables, paragraphs, and where a figure comes from."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal

from result_files import Result
from slipstream.commands.results import Row
from vllm_figures import VERSION

GPU = "NVIDIA H200"
SHAPE = "llama-3.1-8b"
NAMES = {"smollm2-135m": "SmolLM2-135M", SHAPE: "Llama-3.1-8B shape"}
VLLM = f"{VERSION} on the same kind of GPU"
WIDTH = 120

Results = Sequence[Result]  # newest first


def number(value: float, places: int = 0) -> str:
    """Halves are rounded up, as a reader does."""
    return f"{Decimal(str(value)).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP):,}"


def three_digits(value: float) -> str:
    return number(value, max(0, 3 - len(str(int(value)))))


def rate(row: Row | None) -> str:
    return number(row["tok_s"]) if row else ""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def batch_heads(batches: Sequence[int], what: str = "output tokens per second") -> list[str]:
    return [what, *(f"batch {batch}" if i == 0 else str(batch) for i, batch in enumerate(batches))]


def wrapped(text: str) -> str:
    """A paragraph. Commands stay in one line."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    filled = textwrap.fill(whole, WIDTH, break_long_words=False, break_on_hyphens=False)
    return filled.replace("\0", " ") + "\n"


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def span(values: Iterable[float], places: int) -> str:
    values = list(values)
    low, high = number(min(values), places), number(max(values), places)
    return low if low == high else f"{low} to {high}"


def source(command: str, rows: Iterable[Row], results: Results, peer: str = "", hardware: str = f"one {GPU}") -> str:
    """The paragraph that says how the figures of these rows came to be."""
    shown = {id(row) for row in rows}
    days = sorted({result.date[:10] for result in results if any(id(row) in shown for row in result.rows)})
    date = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    parts = [f"Command: `{command}`.", f"Hardware: {hardware}.", f"Date: {date}."]
    return "\n" + wrapped(" ".join([*parts, *([f"Peer: {peer}."] if peer else [])]))
