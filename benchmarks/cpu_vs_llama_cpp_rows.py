"""Rows and tables of `cpu_vs_llama_cpp.py`: results of two engines that ran alternately, combined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

Row = dict[str, Any]


@dataclass
class Turns:
    """Tokens per second of each engine, a figure a turn; llama.cpp's list is empty where it could not be had."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)


def rate_row(case: str, batch: int, phase: str, turns: Turns, **others: Any) -> Row:
    row: Row = {"case": case, "batch": batch, "phase": phase}
    row |= _figures("", turns.ours) | _figures("llama_cpp_", turns.theirs)
    row["ratio"] = _ratio(row["tok_s"], row["llama_cpp_tok_s"])
    row["ratio_of_bests"] = _ratio(row["best_tok_s"], row["llama_cpp_best_tok_s"])
    return row | others


def _figures(prefix: str, rates: Sequence[float]) -> Row:
    return {
        f"{prefix}tok_s": round(median(rates), 2) if rates else None,
        f"{prefix}best_tok_s": round(max(rates), 2) if rates else None,
        f"{prefix}tok_s_runs": [round(rate, 2) for rate in rates],
    }


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return round(ours / theirs, 3) if ours and theirs else None


def memory_fields(memory: Row, cache_bytes: int, file_bytes: int, without_model_bytes: int | None) -> Row:
    """What an engine's process holds, beside the file and the cache; Python with torch is in it, and named apart."""
    fields = {**memory, "cache_bytes": cache_bytes, "file_bytes": file_bytes}
    fields["without_model_bytes"] = without_model_bytes
    rss, needed = memory.get("rss_bytes"), file_bytes + cache_bytes
    fields["rss_to_file_and_cache"] = _ratio(rss, needed)
    fields["model_rss_to_file_and_cache"] = _ratio(rss and rss - (without_model_bytes or 0), needed)
    return fields


@dataclass
class Texts:
    """One engine's answers to all questions, one turn after the other."""

    tokens: int = 0
    seconds: float = 0.0
    drafts: int = 0
    accepted: int = 0
    rates: list[float] = field(default_factory=list)  # of whole turns
    token_ids: list[list[int]] = field(default_factory=list)  # of all turns; empty where a tool does not say

    def add(self, answers: Sequence[Row]) -> None:
        """The answers of one turn."""
        tokens, seconds = (sum(answer[name] for answer in answers) for name in ("num_tokens", "seconds"))
        self.rates.append(tokens / seconds)
        self.tokens += tokens
        self.seconds += seconds
        self.drafts += sum(answer["num_drafts"] for answer in answers)
        self.accepted += sum(answer["num_accepted"] for answer in answers)
        self.token_ids += [answer["token_ids"] for answer in answers if "token_ids" in answer]

    @property
    def acceptance(self) -> float | None:
        return round(self.accepted / self.drafts, 3) if self.drafts else None


def speculation_row(
    case: str, plain: Texts, drafted: Texts, theirs_plain: Texts | None, theirs: Texts | None, **others: Any
) -> Row:
    """Drafts against the same engine without, and llama.cpp's own pair beside them."""
    row = rate_row(case, 1, "decode", Turns(drafted.rates, theirs.rates if theirs else []))
    row |= {"plain_tok_s": round(median(plain.rates), 2), "plain_tok_s_runs": [round(r, 2) for r in plain.rates]}
    row["ratio_to_plain"] = _ratio(row["tok_s"], row["plain_tok_s"])
    row["best_ratio_to_plain"] = _ratio(max(drafted.rates), max(plain.rates))
    row |= {"drafts": drafted.drafts, "accepted": drafted.accepted, "acceptance": drafted.acceptance}
    pairs = zip(plain.token_ids, drafted.token_ids, strict=True)
    row |= {"texts": len(plain.token_ids), "same_texts": sum(a == b for a, b in pairs)}
    if theirs is not None and theirs_plain is not None:
        row["llama_cpp_plain_tok_s"] = round(median(theirs_plain.rates), 2)
        row["llama_cpp_ratio_to_plain"] = _ratio(row["llama_cpp_tok_s"], row["llama_cpp_plain_tok_s"])
        row["llama_cpp_acceptance"] = theirs.acceptance
    return row | others


def tables(rows: Sequence[Row], title: str) -> list[Table]:
    made = [_rates([row for row in rows if "plain_tok_s" not in row and "tok_s" in row], title)]
    made.append(_memory([row for row in rows if row["phase"] == "decode" and row["batch"] == 1 and "rss_bytes" in row]))
    made.append(_starts([row for row in rows if row["phase"] == "start"]))
    made.append(_speculation([row for row in rows if "plain_tok_s" in row]))
    return [table for table in made if table.row_count]


def _table(title: str, *columns: str) -> Table:
    table = Table("file", title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _text(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _busy(row: Row) -> str:
    return f"{row.get('others_share', 0.0):.0%}"


def _rates(rows: Sequence[Row], title: str) -> Table:
    columns = ("batch", "phase", "Slipstream", "best", "llama.cpp", "best", "ratio", "of bests", "others used")
    table = _table(f"tokens per second, {title}", *columns)
    for row in rows:
        figures = [row[name] for name in ("tok_s", "best_tok_s", "llama_cpp_tok_s", "llama_cpp_best_tok_s")]
        ratios = (_text(row["ratio"], 2), _text(row["ratio_of_bests"], 2))
        table.add_row(row["case"], str(row["batch"]), row["phase"], *map(_text, figures), *ratios, _busy(row))
    return table


def _memory(rows: Sequence[Row]) -> Table:
    names = ("rss_bytes", "peak_rss_bytes", "file_bytes", "cache_bytes", "without_model_bytes")
    table = _table(
        "memory, MiB",
        "resident",
        "peak",
        "file",
        "cache",
        "before the model",
        "resident / (file + cache)",
        "without Python",
    )
    for row in rows:
        sizes = [None if row.get(name) is None else row[name] / 2**20 for name in names]
        ratios = (_text(row[f"{what}rss_to_file_and_cache"], 2) for what in ("", "model_"))
        table.add_row(row["case"], *(_text(size, 0) for size in sizes), *ratios)
    return table


def _starts(rows: Sequence[Row]) -> Table:
    table = _table("a new process's first token, second start, s", "median", "best", "others used")
    for row in rows:
        table.add_row(row["case"], _text(row["first_token_s"], 2), _text(min(row["first_token_s_runs"]), 2), _busy(row))
    return table


def _speculation(rows: Sequence[Row]) -> Table:
    columns = (
        "plain",
        "drafts",
        "ratio",
        "accepted",
        "same texts",
        "llama.cpp plain",
        "drafts",
        "ratio",
        "others used",
    )
    table = _table("speculation, batch 1, tokens per second", *columns)
    for row in rows:
        ours = (_text(row["plain_tok_s"]), _text(row["tok_s"]), _text(row["ratio_to_plain"], 2))
        same = f"{row['same_texts']} of {row['texts']}"
        theirs = (_text(row.get("llama_cpp_plain_tok_s")), _text(row["llama_cpp_tok_s"]))
        ratio = _text(row.get("llama_cpp_ratio_to_plain"), 2)
        table.add_row(row["case"], *ours, _text(row["acceptance"], 2), same, *theirs, ratio, _busy(row))
    return table
