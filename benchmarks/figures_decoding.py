"""Plain decoding and EAGLE-3 heads beside vLLM: the table of the README, one stream, and batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import plot_speculation
import plot_throughput
from figures import GPU, NAMES, SHAPE, VLLM, Results, batch_heads, listed, number, rate, source, span, table, wrapped
from result_files import select
from slipstream.commands.results import Row
from slipstream.models.shapes import FORCED_RATES
from vllm_figures import EAGLE3, EAGLE3_K, PLAIN, VERSION

DECODE, SPECULATE = "python benchmarks/decode_throughput.py", "python benchmarks/speculative_throughput.py"


class Pair(NamedTuple):
    plain: Row
    adaptive: Row

    @property
    def speed_up(self) -> float:
        return float(self.adaptive["tok_s"] / self.plain["tok_s"])


def plain_rows(results: Results) -> dict[tuple[str, int], dict[str, Any]]:
    rows = plot_throughput.newest_rows(select(results, "decode-throughput", GPU))
    return {(row["case"], row["batch"]): row for row in rows}


def headline(results: Results) -> str:
    """For the README: one model, plain and with a head, beside vLLM."""
    plain = plain_rows(results)
    high = same_run(select(results, "speculative-throughput", GPU)).get("high", {})
    batches = [batch for batch in EAGLE3[SHAPE] if (SHAPE, batch) in plain and batch in high]
    if not batches:
        return ""
    rows = [
        ["Slipstream, plain", *(rate(plain[SHAPE, batch]) for batch in batches)],
        ["vLLM, plain", *(number(PLAIN[SHAPE][batch]) for batch in batches)],
        ["Slipstream, EAGLE-3 head, draft length adapts", *(rate(high[batch].adaptive) for batch in batches)],
        [f"vLLM, EAGLE-3 head, {EAGLE3_K} drafts", *(number(EAGLE3[SHAPE][batch]) for batch in batches)],
    ]
    text = (
        f"{NAMES[SHAPE]} with random weights in bfloat16 on one {GPU}, greedy, against {VERSION} on the same kind of "
        "GPU; drafts accepted at the same fixed rates in both (`make readme` writes this from benchmarks/results/):"
    )
    return f"{wrapped(text)}\n{table(batch_heads(batches), rows)}"


def one_stream(results: Results) -> str:
    plain = plain_rows(results)
    eagle = select(results, "speculative-throughput", GPU)
    pair = same_run(eagle).get("high", {}).get(1)
    lines, shown = [], []
    for case, peers in PLAIN.items():
        if row := plain.get((case, 1)):
            shown.append(row)
            lines.append([f"{NAMES[case]}, plain", rate(row), number(peers[1]), _ratio(row, peers[1])])
    if pair is not None:
        peer = EAGLE3[SHAPE][1]
        shown.append(pair.adaptive)
        lines.append(
            [
                f"{NAMES[SHAPE]}, EAGLE-3 head (vLLM: k = {EAGLE3_K})",
                rate(pair.adaptive),
                number(peer),
                _ratio(pair.adaptive, peer),
            ]
        )
    if not lines:
        return ""
    text = "Output tokens per second of one request, the decode part; bfloat16, greedy, random weights:"
    commands = f"{DECODE}`, `{SPECULATE} --k adaptive"
    where = source(commands, shown, results, VLLM)
    return f"{wrapped(text)}\n{table(['one request', 'Slipstream', 'vLLM', 'ratio'], lines)}{where}"


def _ratio(row: Row, peer: float) -> str:
    return f"{number(row['tok_s'] / peer, 2)} x"


def decode_throughput(results: Results) -> str:
    own = plain_rows(results)
    if not own:
        return ""
    batches = sorted({batch for _, batch in own})
    num_runs = min(len(row["tok_s_runs"]) for row in own.values())
    intro = (
        "Plain decoding, bfloat16, greedy, 128 prompt and 256 output tokens, the decode part, random weights of both "
        f"shapes, best of {num_runs} runs:"
    )
    lines = []
    for case in dict.fromkeys(case for case, _ in own):
        cells = [own.get((case, batch)) for batch in batches]
        lines.append([f"{NAMES[case]}: Slipstream", *(rate(row) for row in cells)])
        peers = (number(PLAIN[case][batch]) if row else "" for batch, row in zip(batches, cells, strict=True))
        lines.append([f"{NAMES[case]}: vLLM", *peers])
    picture = "![Output tokens per second beside vLLM](throughput.svg)"
    where = source(DECODE, own.values(), results, VLLM)
    return f"{wrapped(intro)}\n{table(batch_heads(batches), lines)}{where}\n{picture}\n"


def eagle3(results: Results) -> str:
    found = select(results, "speculative-throughput", GPU)
    peers = EAGLE3[SHAPE]
    fixed = plot_speculation.newest_rows(found, SHAPE).get(EAGLE3_K, {})
    if not fixed:
        return ""
    rates = " ".join(number(each, 3).lstrip("0") for each in FORCED_RATES[: int(EAGLE3_K)])
    intro = (
        f"With an EAGLE-3 head on the {NAMES[SHAPE]}, random weights, k = {EAGLE3_K}, drafts accepted at vLLM's rates "
        f"({rates}; synthetic acceptance, so the text means nothing):"
    )
    pairs = same_run(found).get("high", {})
    lines = [
        (f"Slipstream, EAGLE-3, k = {EAGLE3_K}", fixed),
        ("Slipstream, EAGLE-3, k adapts", {batch: pair.adaptive for batch, pair in pairs.items()}),
        (f"vLLM, EAGLE-3, k = {EAGLE3_K}", {batch: {"tok_s": peer} for batch, peer in peers.items()}),
        ("Slipstream, plain, in the run where k adapts", {batch: pair.plain for batch, pair in pairs.items()}),
    ]
    cells = [[name, *(rate(rows.get(batch)) for batch in peers)] for name, rows in lines if rows]
    where = source(SPECULATE, [row for _, rows in lines for row in rows.values()], results, VLLM)
    picture = "![Output tokens per second over the batch, with an EAGLE-3 head](speculation.png)"
    return f"{wrapped(intro)}\n{table(batch_heads([*peers]), cells)}{where}\n{picture}\n"


def same_run(results: Results) -> dict[str, dict[int, Pair]]:
    """Draft lengths that adapt beside plain decoding, by rates and batch, of the newest run with both."""
    for result in results:
        of_shape = [row for row in result.rows if "k" in row and row["case"] in (SHAPE, f"{SHAPE}+eagle3")]
        plain = {(row["rates"], row["batch"]): row for row in of_shape if str(row["k"]) == "0" and "rates" in row}
        pairs: dict[str, dict[int, Pair]] = {}
        for row in of_shape:
            if row["k"] == "adaptive":
                # In turns with plain decoding, or after one run of that for all rates.
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
    gains = listed([number(high[batch], 2) for batch in batches])
    text = f"against plain decoding in the same run: {gains} x at batch {listed([str(batch) for batch in batches])}"
    text += f", {number(high[largest], 2)} x at {largest}" if largest not in batches else ""
    rest = []
    if "low" in ratio:
        rest.append(f"{span(ratio['low'].values(), 2)} x where few drafts are accepted")
    if "zero" in ratio:
        rest.append(f"{span(ratio['zero'].values(), 2)} x where none is")
    text = "; ".join(filter(None, [f"With draft lengths that adapt, {text}", ", and ".join(rest)])) + "."
    changes = select(results, f"draft-length-changes-{SHAPE}", GPU)
    shown = [row for of_rates in pairs.values() for pair in of_rates.values() for row in pair]
    if changes:
        text += (
            f" A change of acceptance is followed within {max(row['after_steps'] for row in changes[0].rows)} steps "
            f"(`{SPECULATE} --change`)."
        )
        shown += changes[0].rows
    where = source(f"{SPECULATE} --k adaptive --rates low,zero,high", shown, results, "plain decoding in the same run")
    return wrapped(text) + where
