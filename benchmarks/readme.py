"""The figures of the README, written from the result files: tables and sentences between markers, and two pictures.

    python benchmarks/readme.py    # or `make readme`; a test compares

A figure comes from the newest result that has it, of the right benchmark on the right machine. A part without a result
is left empty, heading and all. What vLLM reached is in ``vllm_figures.py``.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import plot_speculation
import plot_throughput
from result_files import Result, newest_first, select
from slipstream.commands.results import Row
from slipstream.errors import ConfigError
from slipstream.models.shapes import FORCED_RATES
from vllm_figures import EAGLE3, EAGLE3_K, NGRAM_OF_PLAIN, PLAIN, SERVE, VERSION

ROOT = Path(__file__).parents[1]
GPU, CPU = "NVIDIA H200", "Intel Xeon Processor, 2 cores"
SHAPE = "llama-3.1-8b"
NAMES = {"smollm2-135m": "SmolLM2-135M", SHAPE: "Llama-3.1-8B shape"}
SPEC_BENCH_TEXTS = 560  # 480 questions, of which 80 have two turns
METHODS = {"ngram": "n-gram", "eagle3": "EAGLE-3"}
MARKED = re.compile(r"(<!-- generated: ([\w -]+) -->\n?)(.*?)(<!-- end -->)", re.DOTALL)
WIDTH = 120

Results = Sequence[Result]  # newest first


# --- Markdown -------------------------------------------------------------------------------------


def number(value: float, places: int = 0) -> str:
    """Halves are rounded up, as a reader does."""
    return f"{Decimal(str(value)).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP):,}"


def three_digits(value: float) -> str:
    return number(value, max(0, 3 - len(str(int(value)))))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


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


# --- parts ----------------------------------------------------------------------------------------


def decode_throughput(results: Results) -> str:
    rows = plot_throughput.newest_rows(select(results, "decode-throughput", GPU))
    if not rows:
        return ""
    own = {(row["case"], row["batch"]): row for row in rows}
    batches = sorted({batch for _, batch in own})
    num_runs = min(len(row["tok_s_runs"]) for row in rows)
    intro = (
        f"Measured on one {GPU} in bfloat16, greedy, 128 prompt and 256 output tokens, the decode part, against "
        f"{VERSION} on the same kind of GPU (`python benchmarks/decode_throughput.py`; random weights of both shapes, "
        f"best of {num_runs} runs):"
    )
    lines = []
    for case in dict.fromkeys(case for case, _ in own):
        cells = [own.get((case, batch)) for batch in batches]
        lines.append([f"{NAMES[case]}: Slipstream", *(number(row["tok_s"]) if row else "" for row in cells)])
        peers = (number(PLAIN[case][batch]) if row else "" for batch, row in zip(batches, cells, strict=True))
        lines.append([f"{NAMES[case]}: vLLM", *peers])
    picture = "![Output tokens per second beside vLLM](docs/throughput.svg)"
    return f"{wrapped(intro)}\n{table(_batches(batches), lines)}\n{picture}\n"


def _batches(batches: Sequence[int], what: str = "output tokens per second") -> list[str]:
    return [what, *(f"batch {batch}" if i == 0 else str(batch) for i, batch in enumerate(batches))]


def eagle3(results: Results) -> str:
    results = select(results, "speculative-throughput", GPU)
    peers = EAGLE3[SHAPE]
    fixed = plot_speculation.newest_rows(results, SHAPE).get(EAGLE3_K, {})
    if not fixed:
        return ""
    rates = " ".join(number(rate, 3).lstrip("0") for rate in FORCED_RATES[: int(EAGLE3_K)])
    intro = (
        f"With an EAGLE-3 head on the {NAMES[SHAPE]}, k = {EAGLE3_K}, drafts accepted at vLLM's rates ({rates}), on "
        "the same kind of GPU (`python benchmarks/speculative_throughput.py`; random weights):"
    )
    pairs = same_run(results).get("high", {})
    lines = [
        (f"Slipstream, EAGLE-3, k = {EAGLE3_K}", fixed),
        ("Slipstream, EAGLE-3, k adapts", {batch: pair.adaptive for batch, pair in pairs.items()}),
        (f"vLLM, EAGLE-3, k = {EAGLE3_K}", {batch: {"tok_s": rate} for batch, rate in peers.items()}),
        ("Slipstream, plain, in the run where k adapts", {batch: pair.plain for batch, pair in pairs.items()}),
    ]
    cells = [[name, *(_rate(rows.get(batch)) for batch in peers)] for name, rows in lines if rows]
    picture = "![Output tokens per second over the batch, with an EAGLE-3 head](docs/speculation.png)"
    return f"{wrapped(intro)}\n{table(_batches([*peers]), cells)}\n{picture}\n"


def _rate(row: Row | None) -> str:
    return number(row["tok_s"]) if row else ""


class Pair(NamedTuple):
    plain: Row
    adaptive: Row

    @property
    def speed_up(self) -> float:
        return float(self.adaptive["tok_s"] / self.plain["tok_s"])


def same_run(results: Results) -> dict[str, dict[int, Pair]]:
    """Draft lengths that adapt beside plain decoding, by rates and batch, of the newest run with both."""
    for result in results:
        of_shape = [row for row in result.rows if "k" in row and row["case"] in (SHAPE, f"{SHAPE}+eagle3")]
        plain = {(row["rates"], row["batch"]): row for row in of_shape if str(row["k"]) == "0" and "rates" in row}
        pairs: dict[str, dict[int, Pair]] = {}
        for row in of_shape:
            if row["k"] == "adaptive":
                # In turns with plain decoding, or after one run of it for all rates.
                beside = plain.get((row["rates"], row["batch"]), plain.get(("high", row["batch"])))
                if beside:
                    pairs.setdefault(row["rates"], {})[row["batch"]] = Pair(beside, row)
        if set(EAGLE3[SHAPE]) <= pairs.get("high", {}).keys():
            return pairs
    return {}


def adaptive_lengths(results: Results) -> str:
    pairs = same_run(select(results, "speculative-throughput", GPU))
    if not pairs:
        return ""
    ratio = {rates: {batch: pair.speed_up for batch, pair in row.items()} for rates, row in pairs.items()}
    high, batches = ratio["high"], [*EAGLE3[SHAPE]]
    largest = max(high)
    text = f"against plain decoding in the same run: {listed([number(high[b], 2) for b in batches])} x at those batches"
    text += f", {number(high[largest], 2)} x at {largest}" if largest not in batches else ""
    rest = []
    if "low" in ratio:
        rest.append(f"{span(ratio['low'].values(), 2)} x where few drafts pass")
    if "zero" in ratio:
        rest.append(f"{span(ratio['zero'].values(), 2)} x where none does")
    text = "; ".join(filter(None, [f"With draft lengths that adapt, {text}", ", and ".join(rest)])) + "."
    changes = select(results, f"draft-length-changes-{SHAPE}", GPU)
    if changes:
        text += (
            f" A change of acceptance is followed within {max(row['after_steps'] for row in changes[0].rows)} steps."
        )
    return wrapped(text)


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
        "With n-gram drafts whose number adapts, on SmolLM2 and the same GPU (`python benchmarks/speculation.py`; "
        f"plain is the better of the last two runs; vLLM falls to {listed(peer)}):"
    )
    lines = []
    for kind, name in kinds.items():
        rows = [found.get((kind, batch), []) for batch in batches]
        lines.append([f"{name}: plain", *(number(max(r["plain_tok_s"] for r in o[:2])) if o else "" for o in rows)])
        lines.append([f"{name}: n-gram", *(number(o[0]["tok_s"]) if o else "" for o in rows)])
    return f"{wrapped(intro)}\n{table(_batches(batches, 'output tokens per second, SmolLM2-135M'), lines)}"


class Drafts(NamedTuple):
    method: str
    k: int | None  # None: it adapts

    @property
    def label(self) -> str:
        return METHODS[self.method] + ("" if self.k is None else f", k = {self.k}")

    @property
    def order(self) -> tuple[int, int]:
        return list(METHODS).index(self.method), self.k or 0


def spec_bench(results: Results) -> str:
    """Whole runs only: every question. All kinds of a column are one run's."""
    found: dict[tuple[Drafts, float, str, int], Row] = {}
    model = ""
    tolerances: dict[tuple[Any, ...], float | None] = {}  # of the columns' runs
    for result in select(results, "spec-bench", GPU):
        tolerance = next((row["tolerance"] for row in result.rows if row["case"] == "noise"), None)
        groups: dict[tuple[str, Drafts, float, int], list[Row]] = {}
        for row in result.rows:
            name, _, method = row["case"].partition("+")
            if method in METHODS and row.get("limit") is None and model in ("", name):
                drafts = Drafts(method, None if row["k"] == "adaptive" else row["k"])
                groups.setdefault((name, drafts, row["temperature"], row["batch"]), []).append(row)
        for (name, *column), rows in groups.items():
            num_texts = sum(row["num_texts"] for row in rows if row["kind"] != "overall")
            is_whole = num_texts == SPEC_BENCH_TEXTS and any(row["kind"] == "overall" for row in rows)
            if is_whole and tuple(column) not in tolerances:
                model = name
                tolerances[tuple(column)] = tolerance
                drafts, temperature, batch = column
                found |= {(drafts, temperature, row["kind"], batch): row for row in rows}
    columns = sorted({(drafts, batch) for drafts, _, _, batch in found}, key=lambda c: (c[0].order, c[1]))
    temperatures = sorted({temperature for _, temperature, _, _ in found})
    if not found:
        return ""
    intro = (
        f"Spec-Bench's 480 questions, both turns, {NAMES.get(model, model)}, answers of up to "
        f"{max(row['output_len'] for row in found.values())} tokens with their prompts in the time, on the same GPU "
        "(`python benchmarks/spec_bench.py`). Accepted length, tokens a step that checks drafts with the target's own "
        "included, and speed-up over plain decoding:"
    )
    parts = [wrapped(intro)]
    for temperature in temperatures:
        kinds = dict.fromkeys(kind for _, t, kind, _ in found if t == temperature)
        head = ["greedy" if temperature == 0 else f"temperature {temperature:g}"]
        head += [f"{drafts.label}, batch {batch}" for drafts, batch in columns]
        lines = []
        for kind in sorted(kinds, key=lambda kind: kind == "overall"):
            rows = [found.get((drafts, temperature, kind, batch)) for drafts, batch in columns]
            cells = (f"{number(r['accepted_length'], 2)}, {number(r['ratio'], 2)} x" if r else "" for r in rows)
            lines.append([kind.replace("mt_bench", "MT-bench").replace("_", " "), *cells])
        parts.append(table(head, lines))
    texts = [row for key, row in found.items() if key[2] != "overall"]
    total, same, ties = (sum(row[name] for row in texts) for name in ("num_texts", "same_texts", "near_ties"))
    parts.append(
        wrapped(
            f"Of {number(total)} texts {number(same)} are the plain run's, token for token; {number(ties)} leave it at "
            f"{_near_tie(tolerances.values())}, {number(total - same - ties)} anywhere else."
        )
    )
    return "\n".join(parts)


def _near_tie(tolerances: Collection[float | None]) -> str:
    """With its limit where every run has measured it."""
    measured = [tolerance for tolerance in tolerances if tolerance is not None]
    if len(measured) < len(tolerances):
        return "a near-tie of bfloat16"
    return (
        f"a near-tie of bfloat16 (gaps below {span(measured, 2)}, twice the largest change that computing the same "
        "token as part of a prompt makes)"
    )


def serving(results: Results) -> str:
    case = "smollm2-135m+serve"
    found: dict[tuple[str, int], Row] = {}
    for kind in (case, f"{case}+eagle3"):
        for result in select(results, kind, GPU):
            for row in result.rows:
                found.setdefault((row["case"], row["batch"]), row)
    batches = [batch for batch in SERVE if (case, batch) in found]
    if not batches:
        return ""
    intro = (
        f"Over HTTP, streamed chat with {NAMES['smollm2-135m']}, 128 output tokens, closed loop, on the same kind of "
        "GPU with 16 cores (`slipstream bench serve --concurrency N`); vLLM with the same load:"
    )
    lines = []
    for own, name in ((case, "Slipstream"), (f"{case}+eagle3", "Slipstream, EAGLE-3, k adapts")):
        rows = [found.get((own, batch)) for batch in batches]
        if any(rows):
            lines.append([f"{name}: tokens per second", *(_rate(row) for row in rows)])
            times = ["" if row is None else _first_ms(row["ttft_p50_ms"], row["ttft_p99_ms"]) for row in rows]
            lines.append([f"{name}: first token, p50 / p99", *times])
    lines.append([f"{VERSION}: tokens per second", *(number(SERVE[batch][0]) for batch in batches)])
    lines.append([f"{VERSION}: first token, p50 / p99", *(_first_ms(*SERVE[batch][1:]) for batch in batches)])
    return f"{wrapped(intro)}\n{table(['streams', *map(str, batches)], lines)}"


def _first_ms(median: float, p99: float) -> str:
    return f"{number(median)} / {number(p99)} ms"


def startup(results: Results) -> str:
    for result in select(results, "startup", GPU):
        seconds: dict[str, list[float]] = {}
        for row in result.rows:
            if row["case"] == "smollm2-135m":
                seconds.setdefault(row["caches"], []).append(row["first_token_s"])
        if {"warm", "cold"} <= seconds.keys():
            warm, cold = (number(mean(seconds[kind])) for kind in ("warm", "cold"))
            return wrapped(
                "From the start of the process to the first token of SmolLM2 (`python benchmarks/startup.py`): "
                f"{warm} s, {cold} s with empty kernel caches."
            )
    return ""


def cpu(results: Results) -> str:
    for result in select(results, "smollm2-135m-vs-transformers", CPU):
        rows = {(row["engine"], row["batch"]): row for row in result.rows if "engine" in row}
        batches = sorted({batch for _, batch in rows})
        version = next((f" {row['transformers']}" for row in rows.values() if "transformers" in row), "")
        intro = (
            "Measured on a 2-core CPU, SmolLM2-135M in float32, greedy, 64 output tokens, neighbouring turns in one "
            "run (`python benchmarks/cpu_vs_transformers.py`):"
        )
        lines = [
            [name, *(three_digits(rows[engine, batch]["tok_s"]) for batch in batches)]
            for engine, name in (("slipstream", "Slipstream"), ("transformers", f"transformers{version}"))
        ]
        head = ["output tokens per second", *(f"batch {batch}" for batch in batches)]
        return f"{wrapped(intro)}\n{table(head, lines)}"
    return ""


def attention(results: Results) -> str:
    for result in select(results, "attention", GPU):
        us: dict[str, dict[tuple[int, ...], float]] = {"triton": {}, "flashinfer": {}}
        for row in result.rows:
            if row["case"] in us and not row.get("common"):
                us[row["case"]][row["batch"], row["query_len"], row["context"]] = row["us"]
        ratios = {key: us["flashinfer"][key] / own for key, own in us["triton"].items() if key in us["flashinfer"]}
        if ratios:
            low, high = number(min(ratios.values()), 2), number(max(ratios.values()), 1)
            contexts = [key[-1] for key in ratios]
            return (
                f" Decode attention in Triton is {low} to {high} x FlashInfer's speed on an H200, from "
                f"{number(min(contexts))} to {number(max(contexts))} tokens of context."
            )
    return ""


def host(results: Results) -> str:
    for result in select(results, "host-loop", GPU):
        us = {row["batch"]: row["host_us"] for row in result.rows if row["case"] == "plain"}
        if 1 in us and len(us) > 1:
            most = max(us)
            one = f"; a host that spends {number(us[1])} µs on a step of one request"
            return f"{one} and {number(us[most])} on one of {most}"
    return ""


PARTS: dict[str, Callable[[Results], str]] = {
    "attention": attention,
    "host": host,
    "decode throughput": decode_throughput,
    "eagle3": eagle3,
    "adaptive lengths": adaptive_lengths,
    "ngram": ngram,
    "spec bench": spec_bench,
    "serving": serving,
    "startup": startup,
    "cpu": cpu,
}


# --- the page and the pictures --------------------------------------------------------------------


def update(page: str, results: Results) -> str:
    """The page with each part between its markers replaced."""
    names = [match[2] for match in MARKED.finditer(page)]
    if sorted(names) != sorted(PARTS):
        wrong = [name for name in PARTS if names.count(name) != 1] or sorted(set(names) - set(PARTS))
        raise ConfigError(
            f"the README must have '<!-- generated: {wrong[0]} -->' once if it is a part, else not at all"
        )

    def fill(match: re.Match[str]) -> str:
        try:
            return match[1] + PARTS[match[2]](results) + match[4]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a row for the README's part '{match[2]}' lacks or misspells {error}") from error

    return MARKED.sub(fill, page)


def pictures(results: Results, folder: Path) -> list[Path]:
    """Redrawn where there are results for them."""
    drawn = []
    if rows := plot_throughput.newest_rows(select(results, "decode-throughput", GPU)):
        drawn.append(folder / "throughput.svg")
        drawn[-1].write_text(plot_throughput.draw(rows), encoding="utf-8")
    if found := plot_speculation.newest_rows(select(results, "speculative-throughput", GPU), SHAPE):
        drawn.append(folder / "speculation.png")
        plot_speculation.draw(found, SHAPE, drawn[-1])
    return drawn


def main() -> int:
    page = ROOT / "README.md"
    try:
        results = newest_first((ROOT / "benchmarks" / "results").glob("*.json"))
        page.write_text(update(page.read_text(encoding="utf-8"), results), encoding="utf-8")
        written: list[Any] = [page, *pictures(results, ROOT / "docs")]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print('error: the pictures need matplotlib; pip install "slipstream[plots]"', file=sys.stderr)
        return 2
    for path in written:
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
