"""Vectors of texts per second, beside another library in the same run.

By default shapes with random weights and token ids, beside ``transformers`` with batches sorted by length and padded,
so that tokenising is not counted:

    python benchmarks/embeddings.py [--shapes minilm-l6,qwen3-0.6b] [--tokens 128] [--texts 512] [--device cuda]

With ``--model`` a folder of real weights and texts of words, beside ``sentence-transformers``, tokenising counted on
both sides:

    python benchmarks/embeddings.py --model FOLDER

Texts have ``--tokens`` tokens each; ``--ragged`` draws lengths from a quarter of that to seven quarters. Both take
turns after a warm-up; figures are of the fastest turn of each, and vectors are compared where the weights are the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from quiet import Quiet
from slipstream import LLM
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import build_shape
from slipstream.models.shapes import shape_config

NUM_TURNS = 3
WORDS = ("the", "of", "and", "in", "to", "was", "is", "for", "on", "with", "by", "he", "that", "from", "his", "which")
Embed = Callable[[Sequence[Any]], np.ndarray]


class Side(NamedTuple):
    name: str
    embed: Embed


def draw_lengths(arguments: argparse.Namespace) -> list[int]:
    rng, tokens = random.Random(0), arguments.tokens
    if not arguments.ragged:
        return [tokens] * arguments.texts
    return [rng.randint(max(1, tokens // 4), max(1, 7 * tokens // 4)) for _ in range(arguments.texts)]


def transformers_side(shape: str, device: str, dtype: torch.dtype, batch: int) -> Side:
    """The same shape with random weights: batches of texts of similar length, padded to the longest."""
    from transformers import AutoConfig, AutoModel

    known = shape_config(shape)
    config = AutoConfig.for_model(**{key: value for key, value in known.items() if key != "architectures"})
    model = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    is_causal = known["model_type"] != "bert"

    @torch.inference_mode()
    def embed(texts: Sequence[Any]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = np.zeros((len(texts), known["hidden_size"]), np.float32)
        for begin in range(0, len(order), batch):
            chosen = order[begin : begin + batch]
            longest = len(texts[chosen[0]])
            ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
            mask = torch.zeros(len(chosen), longest, dtype=torch.int64)
            for row, i in enumerate(chosen):
                ids[row, : len(texts[i])], mask[row, : len(texts[i])] = torch.tensor(texts[i]), 1
            ids, mask = ids.to(device), mask.to(device)
            hidden = model(ids, attention_mask=mask).last_hidden_state.float()
            if is_causal:
                vectors = hidden[torch.arange(len(chosen), device=device), mask.sum(1) - 1]
            else:
                vectors = (hidden * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
            found[chosen] = torch.nn.functional.normalize(vectors, dim=1).cpu().numpy()
        return found

    return Side("transformers", embed)


def sentence_transformers_side(folder: str, device: str, batch: int) -> Side:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device=device)
    return Side("sentence-transformers", lambda texts: np.asarray(model.encode(list(texts), batch_size=batch)))


def own_side(llm: LLM) -> Side:
    def embed(texts: Sequence[Any]) -> np.ndarray:
        outputs = llm.embed(texts)
        if failed := [output.error for output in outputs if output.error]:
            raise SystemExit(failed[0])
        return np.stack([output.embedding for output in outputs])

    return Side("slipstream", embed)


def take_turns(sides: Sequence[Side], texts: Sequence[Any], device: str) -> tuple[dict[str, float], Quiet]:
    """Seconds of the fastest turn of each."""
    quiet, best = Quiet(0.1, 2 if device == "cpu" else 1), {side.name: float("inf") for side in sides}

    def run(side: Side) -> float:
        begin = time.perf_counter()
        side.embed(texts)
        return time.perf_counter() - begin

    for side in sides:
        side.embed(texts[: max(1, len(texts) // 4)])
    for _ in range(NUM_TURNS):
        for side in sides:
            best[side.name] = min(best[side.name], quiet(lambda side=side: run(side)))
    return best, quiet


def measure(case: str, sides: Sequence[Side], texts: Sequence[Any], arguments: argparse.Namespace) -> Row:
    best, quiet = take_turns(sides, texts, arguments.device)
    own, other = (best[side.name] for side in sides)
    return {
        "case": case,
        "batch": len(texts),
        "tokens": arguments.tokens,
        "ragged": arguments.ragged,
        "peer": sides[1].name,
        "peer_batch": arguments.batch,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "texts_s": round(len(texts) / own, 1),
        "peer_texts_s": round(len(texts) / other, 1),
        "ratio": round(other / own, 2),
        "others_share": round(max(quiet.shares, default=0.0), 3),
    }


def measure_shape(shape: str, arguments: argparse.Namespace) -> Row:
    lengths, vocab_size = draw_lengths(arguments), shape_config(shape)["vocab_size"]
    rng = random.Random(1)
    texts = [[rng.randrange(10, vocab_size) for _ in range(length)] for length in lengths]
    options = {"device": arguments.device, "dtype": arguments.dtype, "max_model_len": max(512, *lengths)}
    llm = LLM(build=lambda: build_shape(EngineOptions.from_dict(options), shape), speculate="none")
    peer = transformers_side(shape, arguments.device, getattr(torch, arguments.dtype), arguments.batch)
    try:
        return measure(shape, [own_side(llm), peer], texts, arguments)
    finally:
        llm.close()


def measure_model(arguments: argparse.Namespace) -> Row:
    rng = random.Random(2)
    # Two tokens are the special ones around a text.
    texts = [" ".join(rng.choice(WORDS) for _ in range(max(1, length - 2))) for length in draw_lengths(arguments)]
    with LLM(arguments.model, device=arguments.device, dtype=arguments.dtype) as llm:
        sides = [own_side(llm), sentence_transformers_side(arguments.model, arguments.device, arguments.batch)]
        few = texts[:32]
        error = float(np.abs(sides[0].embed(few) - sides[1].embed(few)).max())
        row = measure(Path(arguments.model).name, sides, texts, arguments)
    return row | {"largest_difference": float(f"{error:.2g}")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="minilm-l6,qwen3-0.6b")
    parser.add_argument("--model", help="a folder of real weights, beside sentence-transformers")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--texts", type=int)
    parser.add_argument("--batch", type=int, help="texts of a batch of the other library")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    on_gpu = arguments.device == "cuda"
    arguments.texts = arguments.texts or (4096 if on_gpu else 64)
    arguments.batch = arguments.batch or (256 if on_gpu else 32)
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    if arguments.model:
        rows = [measure_model(arguments)]
    else:
        rows = [measure_shape(shape, arguments) for shape in arguments.shapes.split(",")]
    results = collect_results(rows, device=arguments.device)
    table = Table(*("case", "texts/s", rows[0]["peer"], "ratio", "others"), title=f"vectors, {results.hardware}")
    for row in rows:
        names = ("case", "texts_s", "peer_texts_s", "ratio", "others_share")
        table.add_row(*(str(row[name]) for name in names))
    Console(width=100).print(table)
    print(f"written to {write_results(results, arguments.output_dir, 'embeddings')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
