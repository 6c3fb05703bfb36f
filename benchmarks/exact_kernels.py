"""The kernel part of ``exact.py``: rows of products, experts and attention are equal to the bit for every batch.

On a GPU the Triton kernels of exact mode, in bfloat16; on a CPU its C kernels, in float32.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from slipstream.commands.results import Row
from slipstream.kernels.attention.batched_attention import in_place_attention
from slipstream.kernels.attention.exact_attention import exact_attention
from slipstream.kernels.attention.paged_attention import PagedRequests
from slipstream.kernels.linear import exact_linear
from slipstream.kernels.linear.exact_tiles import Cut
from slipstream.kernels.linear.moe import expert_mlp
from slipstream.kernels.linear.small_linear import Epilogue, Scaled
from slipstream.weights.dense import DenseWeight
from slipstream.weights.matrix import Matrix

MOST_LOGITS = 512  # rows of a vocabulary in memory
PAGE_SIZE = 16


class Sizes(NamedTuple):
    """The sizes of a model's products and heads."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0  # 0: dense, with one feed-forward
    chosen: int = 0


MODELS = {
    "smollm2-135m": Sizes(576, 1536, 9, 3, 64, 49152),
    "llama-3.1-8b": Sizes(4096, 14336, 32, 8, 128, 128256),
    "qwen3-30b-a3b": Sizes(2048, 768, 32, 4, 128, 151936, 128, 8),
    "tiny": Sizes(96, 128, 4, 2, 32, 160),
}
Run = Callable[[slice], tuple[Tensor, ...]]


def all_numbers_of_tokens(largest: int) -> list[int]:
    return [n for n in (*range(1, 65), 100, 256, 1000, 8192) if n <= largest]


def check_kernels(model: str, device: torch.device, largest: int, num_draws: int) -> list[Row]:
    """A row for each kernel: how many comparisons were made, and how many found no difference."""
    sizes, dtype = MODELS[model], torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.inference_mode(), device:
        torch.manual_seed(0)
        rows = [check_rows(name, run, count) for name, run, count in products(sizes, dtype, largest)]
        rows.append(check_attention(sizes, dtype, num_draws))
        if device.type == "cuda":
            rows.append(plant_a_cut(sizes, dtype))
    return [{"case": "exact-kernels", "batch": largest, "model": model, **row} for row in rows]


def check_rows(name: str, run: Run, most: int) -> Row:
    """Some rows by themselves, for every number of them, against the same rows among all."""
    rng, whole, equal, total = random.Random(name), run(slice(0, most)), 0, 0
    for count in all_numbers_of_tokens(most):
        first = rng.randrange(most - count + 1)
        own = run(slice(first, first + count))
        total += 1
        equal += all(torch.equal(a[first : first + count], b) for a, b in zip(whole, own, strict=True))
    return {"kernel": name, "compared": total, "equal": equal}


# --- products ---------------------------------------------------------------------------------------


def products(sizes: Sizes, dtype: torch.dtype, largest: int) -> Iterator[tuple[str, Run, int]]:
    """Each product of a layer with what is fused to it, experts, and logits: a name, a run of some rows, how many."""
    qkv = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    mixed = sizes.heads * sizes.head_dim
    shapes = {"qkv": (qkv, sizes.hidden), "o": (sizes.hidden, mixed)}
    if not sizes.experts:
        shapes |= {"gate_up": (2 * sizes.intermediate, sizes.hidden), "down": (sizes.hidden, sizes.intermediate)}
    for name, (num_rows, in_size) in shapes.items():
        matrix = exact_matrix(num_rows, in_size, dtype)
        x = torch.randn(largest, in_size, dtype=dtype)
        yield f"{name} {num_rows}x{in_size}", projected(matrix, x), largest
        if matrix.tile_key("plain") is not None:
            yield f"{name} {num_rows}x{in_size}, fused", fused(matrix, x, name, num_rows), largest
    if sizes.experts:
        yield experts(sizes, dtype, largest)
    head, count = exact_matrix(sizes.vocab, sizes.hidden, dtype), min(largest, MOST_LOGITS)
    x = torch.randn(count, sizes.hidden, dtype=dtype)
    yield f"logits {sizes.vocab}x{sizes.hidden}", lambda rows: (head.project_wide(x[rows]),), count


def exact_matrix(num_rows: int, in_size: int, dtype: torch.dtype) -> Matrix:
    weight = DenseWeight.from_tensor((torch.randn(num_rows, in_size) / in_size**0.5).to(dtype))
    device = weight.weight.device
    found = weight.finish(device).exact(device)
    assert found is not None, "there are no exact products on this machine"
    return found


def projected(matrix: Matrix, x: Tensor) -> Run:
    return lambda rows: (matrix.project(x[rows], None),)


def fused(matrix: Matrix, x: Tensor, name: str, num_rows: int) -> Run:
    """As a layer has them: after a norm, with a gate, or before the residual stream and the next norm."""
    squares = torch.randint(1 << 34, 1 << 38, (len(x), 5))
    residual, gain = torch.randn(len(x), num_rows, dtype=x.dtype), torch.randn(num_rows, dtype=x.dtype)

    def run(rows: slice) -> tuple[Tensor, ...]:
        if name in ("o", "down"):
            out, scaled, sums = matrix.project_few(x[rows], Epilogue(None, residual[rows], gain))
            assert scaled is not None
            assert sums is not None
            return out, scaled, sums.sum(1)
        end = Epilogue(activation="silu" if name == "gate_up" else "")
        return (matrix.project_few(Scaled(x[rows], squares[rows], 1e-5), end).out,)

    return run


def experts(sizes: Sizes, dtype: torch.dtype, largest: int) -> tuple[str, Run, int]:
    num, hidden, size = sizes.experts, sizes.hidden, sizes.intermediate
    gate_up = (torch.randn(num, 2 * size, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(num, hidden, size) / size**0.5).to(dtype)
    x, scores = torch.randn(largest, hidden, dtype=dtype), torch.randn(largest, num)
    weights, ids = scores.softmax(1).topk(sizes.chosen, dim=1)

    def run(rows: slice) -> tuple[Tensor, ...]:
        return (expert_mlp(x[rows], weights[rows], ids[rows], gate_up, down),)

    return f"experts {num}x{size}x{hidden}", run, largest


def plant_a_cut(sizes: Sizes, dtype: torch.dtype) -> Row:
    """A product that is cut into more parts for few tokens must be found: otherwise the checks say nothing."""

    def by_tokens(tokens: exact_linear.Tokens, *rest: Any) -> tuple[Cut, Any]:
        cut, tile = choose(tokens, *rest)
        width = -(-cut.width // 256) * 64
        return (Cut(-(-tokens.x.shape[1] // width), width) if tokens.x.shape[0] < 9 else cut), tile

    choose = exact_linear.choose_tile
    x, matrix = torch.randn(64, sizes.hidden, dtype=dtype), exact_matrix(512, sizes.hidden, dtype)
    with mock.patch.object(exact_linear, "choose_tile", by_tokens):
        row = check_rows("planted cut", lambda rows: (matrix.project_wide(x[rows]),), 64)
    return {"kernel": "planted cut", "compared": row["compared"], "equal": row["equal"], "is_found": row["equal"] < 64}


# --- attention --------------------------------------------------------------------------------------


def check_attention(sizes: Sizes, dtype: torch.dtype, num_draws: int, longest: int = 4000) -> Row:
    """Texts as whole prompts, against spans of them in drawn batches: decodes, verifications, chunks, side by side."""
    rng, num_texts = random.Random(0), 4
    longest = longest if torch.empty(0).is_cuda else 300
    max_pages = -(-longest // PAGE_SIZE)
    shape = (num_texts * max_pages + 1, 2, sizes.kv_heads, PAGE_SIZE, sizes.head_dim)
    cache = torch.randn(shape, dtype=dtype)
    table = 1 + torch.randperm(num_texts * max_pages).view(num_texts, max_pages).int()
    queries = torch.randn(num_texts, longest, sizes.heads, sizes.head_dim, dtype=dtype)

    def attend(spans: list[tuple[int, int, int]], query_len: int) -> list[Tensor]:
        counts = [end - first for _, first, end in spans]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        numbers = (torch.tensor(x, dtype=torch.int32) for x in (starts, counts, [end for *_, end in spans]))
        requests = PagedRequests(*numbers, table[[text for text, *_ in spans]])
        q = torch.cat([queries[text, first:end] for text, first, end in spans])
        scale = sizes.head_dim**-0.5
        if q.is_cuda:
            out = exact_attention(q, cache, requests, scale, 0, query_len)
        else:
            out = in_place_attention(q, cache, requests, scale, 0, alone=True)
        return list(out.split(counts))

    whole = [attend([(text, 0, longest)], 0)[0] for text in range(num_texts)]
    equal = total = 0
    for _ in range(num_draws):
        query_len = rng.choice([0, 1, 1, *range(2, 18)])
        spans = []
        for text in rng.choices(range(num_texts), k=rng.choice([1, 2, 5, 40])):
            count = query_len or rng.choice([1, 5, 64, rng.randrange(1, 200)])
            first = rng.randrange(longest - count)
            spans.append((text, first, first + count))
        for (text, first, end), out in zip(spans, attend(spans, query_len), strict=True):
            total += 1
            equal += torch.equal(out, whole[text][first:end])
    name = f"attention {sizes.heads}/{sizes.kv_heads}x{sizes.head_dim}"
    return {"kernel": name, "compared": total, "equal": equal}
