"""Drafts on real texts: n-grams, and Spec-Bench's questions, beside plain decoding."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from figures import GPU, NAMES, VLLM, Results, batch_heads, listed, number, source, span, table, wrapped
from result_files import select
from slipstream.commands.results import Row
from vllm_figures import NGRAM_OF_PLAIN

SPEC_BENCH_TEXTS = 560  # 480 questions, of which 80 have two turns
METHODS = {"ngram": "n-gram", "eagle3": "EAGLE-3"}


def ngram(results: Results) -> str:
    """Plain is the better of the last two runs, so that a slow one does not flatter the drafts."""
    kinds = {"chat": "chat prompts", "repeat": "prompts that ask to repeat a text"}
    found: dict[tuple[str, int], list[Row]] = {}
    for result in select(results, "speculation-ngram", GPU):
        for row in result.rows:
            model, _, kind = row["case"].partition("+ngram-")
            if model == "smollm2-135m" and kind in kinds and row.get("k") == "adaptive":
                found.setdefault((kind, row["batch"]), []).append(row)
    if not found:
        return ""
    batches = sorted({batch for _, batch in found})
    (first, part), *others = NGRAM_OF_PLAIN.items()
    peer = [f"{part:.2f} of its plain speed at batch {first}", *(f"{part:.2f} at {batch}" for batch, part in others)]
    intro = (
        "N-gram drafts whose number adapts, greedy; plain is the better of the last two runs. vLLM with n-gram drafts "
        f"reaches {listed(peer)}:"
    )
    lines = []
    for kind, name in kinds.items():
        rows = [found.get((kind, batch), []) for batch in batches]
        lines.append([f"{name}: plain", *(number(max(r["plain_tok_s"] for r in o[:2])) if o else "" for o in rows)])
        lines.append([f"{name}: n-gram", *(number(o[0]["tok_s"]) if o else "" for o in rows)])
    head = batch_heads(batches, "output tokens per second, SmolLM2-135M")
    shown = [row for rows in found.values() for row in rows[:2]]
    return f"{wrapped(intro)}\n{table(head, lines)}{source('python benchmarks/speculation.py', shown, results, VLLM)}"


class Drafts(NamedTuple):
    method: str
    k: int | None  # None: it adapts

    @property
    def label(self) -> str:
        return METHODS[self.method] + ("" if self.k is None else f", k = {self.k}")

    @property
    def order(self) -> tuple[int, int]:
        return list(METHODS).index(self.method), self.k or 0


class Column(NamedTuple):
    """One run of every question."""

    drafts: Drafts
    temperature: float
    batch: int


class SpecBench(NamedTuple):
    model: str
    rows: dict[tuple[Column, str], Row]  # by column and kind of question
    tolerances: dict[Column, float | None]  # of the columns' runs


def whole_runs(results: Results) -> SpecBench:
    """Every question of one model, the newest run of each column."""
    rows: dict[tuple[Column, str], Row] = {}
    model = ""
    tolerances: dict[Column, float | None] = {}
    for result in select(results, "spec-bench", GPU):
        tolerance = next((row["tolerance"] for row in result.rows if row["case"] == "noise"), None)
        groups: dict[tuple[str, Column], list[Row]] = {}
        for row in result.rows:
            name, _, method = row["case"].partition("+")
            if method in METHODS and row.get("limit") is None and model in ("", name):
                drafts = Drafts(method, None if row["k"] == "adaptive" else row["k"])
                groups.setdefault((name, Column(drafts, row["temperature"], row["batch"])), []).append(row)
        for (name, column), found in groups.items():
            num_texts = sum(row["num_texts"] for row in found if row["kind"] != "overall")
            is_whole = num_texts == SPEC_BENCH_TEXTS and any(row["kind"] == "overall" for row in found)
            if is_whole and column not in tolerances:
                model = name
                tolerances[column] = tolerance
                rows |= {(column, row["kind"]): row for row in found}
    return SpecBench(model, rows, tolerances)


def spec_bench(results: Results, batch: int) -> str:
    """The tables of one batch size, a column a drafter."""
    bench = whole_runs(results)
    columns = sorted((c for c in bench.tolerances if c.batch == batch), key=lambda column: column.drafts.order)
    if not columns:
        return ""
    rows = [row for (column, _), row in bench.rows.items() if column in columns]
    where = "one request at a time" if batch == 1 else f"{batch} requests at a time"
    intro = (
        f"Spec-Bench's 480 questions, both turns, {NAMES.get(bench.model, bench.model)}, {where}, answers of up to "
        f"{max(row['output_len'] for row in rows)} tokens, with their prompts in the time. Accepted length (tokens of "
        "a step that verifies drafts, the target's own included) and speed-up over plain decoding:"
    )
    parts = [wrapped(intro)]
    for temperature in sorted({column.temperature for column in columns}):
        some = [column for column in columns if column.temperature == temperature]
        kinds = dict.fromkeys(kind for column, kind in bench.rows if column in some)
        head = ["greedy" if temperature == 0 else f"temperature {temperature:g}", *(c.drafts.label for c in some)]
        lines = []
        for kind in sorted(kinds, key=lambda kind: kind == "overall"):
            cells = (_cell(bench.rows.get((column, kind))) for column in some)
            lines.append([kind.replace("mt_bench", "MT-bench").replace("_", " "), *cells])
        parts.append(table(head, lines))
    command = f"python benchmarks/spec_bench.py --batch {batch}"
    return "\n".join(parts) + source(command, rows, results, "plain decoding in the same run")


def _cell(row: dict[str, Any] | None) -> str:
    return f"{number(row['accepted_length'], 2)}, {number(row['ratio'], 2)} x" if row else ""


def same_texts(results: Results) -> str:
    """How many answers are those of plain decoding, and where the others leave them."""
    bench = whole_runs(results)
    texts = [row for (_, kind), row in bench.rows.items() if kind != "overall"]
    if not texts:
        return ""
    total, same, ties = (sum(row[name] for row in texts) for name in ("num_texts", "same_texts", "near_ties"))
    text = (
        f"Of {number(total)} texts {number(same)} are the plain run's, token for token; {number(ties)} leave it at "
        f"{_near_tie(bench.tolerances.values())}, {number(total - same - ties)} anywhere else."
    )
    return wrapped(text) + source("python benchmarks/spec_bench.py", texts, results, "plain decoding in the same run")


def real_pair(results: Results) -> str:
    """A target and a smaller sibling from published files, on a CPU."""
    for result in (result for result in results if result.kind == "cpu-vs-llama-cpp"):
        rows = [row for row in result.rows if row["case"].endswith("+draft-code")]
        if not rows:
            continue
        (row,) = rows
        intro = (
            "Qwen2.5-Coder-1.5B-Instruct with its 0.5B sibling as draft model, both Q4_K_M files, greedy, "
            f"{row['texts']} requests for code one after another, {row['answer_len']} tokens each; "
            f"{row['same_texts']} of {row['texts']} texts are the plain run's, token for token:"
        )
        ours, theirs = (row["plain_tok_s"], row["tok_s"]), (row["llama_cpp_plain_tok_s"], row["llama_cpp_tok_s"])
        lines = [
            [name, *(number(value, 1) for value in pair), f"{number(pair[1] / pair[0], 2)} x", _percent(share)]
            for name, pair, share in (
                ("Slipstream", ours, row["acceptance"]),
                ("llama.cpp", theirs, row["llama_cpp_acceptance"]),
            )
        ]
        head = ["output tokens per second", "plain", "with drafts", "of plain", "drafts accepted"]
        command = "python benchmarks/cpu_vs_llama_cpp.py"
        peer = f"{row['llama_cpp']} on the same machine"
        return f"{wrapped(intro)}\n{table(head, lines)}{source(command, rows, results, peer, result.hardware)}"
    return ""


def _percent(share: float) -> str:
    return f"{number(100 * share)} %"


def acceptance(results: Results) -> str:
    """What both checks accept, with drafters made from the target itself."""
    found: dict[tuple[str, float], dict[str, Row]] = {}
    for result in select(results, "acceptance", GPU):
        for row in result.rows:
            case, _, check = row["case"].rpartition(", ")
            if check in ("match", "rejection"):
                found.setdefault((case.partition("drafter: ")[2], row["temperature"]), {}).setdefault(check, row)
    whole = {key: checks for key, checks in sorted(found.items()) if len(checks) == 2}
    if not whole:
        return ""
    rows = [row for checks in whole.values() for row in checks.values()]
    lines = []
    for (drafter, temperature), checks in whole.items():
        cells = (f"{number(row['mean_length'], 2)}, {_share(row)}" for _, row in sorted(checks.items()))
        lines.append([drafter, f"{temperature:g}", *cells])
    intro = (
        f"What the two checks accept: SmolLM2 and drafters made from it, {rows[0]['batch']} chat prompts answered to "
        f"their end, k = {rows[0]['k']}; tokens a step, and the share of all drafts that is accepted:"
    )
    head = ["drafter", "temperature", "`match`", "`rejection`"]
    return f"{wrapped(intro)}\n{table(head, lines)}{source('python benchmarks/acceptance.py', rows, results, 'none')}"


def _share(row: Row) -> str:
    return f"{number(100 * row['accepted'] / row['drafts'])} %"


def _near_tie(tolerances: Collection[float | None]) -> str:
    """With its limit where every run has measured it."""
    measured = [tolerance for tolerance in tolerances if tolerance is not None]
    if len(measured) < len(tolerances):
        return "a near-tie of bfloat16"
    return (
        f"a near-tie of bfloat16 (gaps below {span(measured, 2)}, twice the largest change that computing the same "
        "token as part of a prompt makes)"
    )
