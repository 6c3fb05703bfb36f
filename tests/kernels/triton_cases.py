"""Odd shapes, empty rows and poisoned memory for every Triton kernel; run interpreted and on a GPU alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.exact_attention import exact_attention
from slipstream.kernels.attention.rope_cache import rope_and_cache, rotation, rotation_and_slots
from slipstream.kernels.attention.triton_attention import triton_attention
from slipstream.kernels.elementwise.geglu import geglu
from slipstream.kernels.elementwise.swiglu import swiglu
from slipstream.kernels.elementwise.tap import tap
from slipstream.kernels.step.commit import NUM_HEADER_COLUMNS, commit
from slipstream.kernels.step.prepare_inputs import prepare_inputs
from slipstream.kernels.step.row_writes import write_rows
from slipstream.kernels.training.entropy_grads import entropy_grads
from slipstream.plan import RowStatus
from tests.kernels.attention.dense_attention import hide_queries, plant_nan
from tests.kernels.triton_cases_cascade import cascades
from tests.kernels.triton_cases_delta import chunks, convolutions, gated_norms, recurrences
from tests.kernels.triton_cases_drafts import head_passes
from tests.kernels.triton_cases_encoded import cross_attention, encoded_pages
from tests.kernels.triton_cases_encoder import encoders
from tests.kernels.triton_cases_exact import exact_products
from tests.kernels.triton_cases_fused import decodes, products
from tests.kernels.triton_cases_index import indexers
from tests.kernels.triton_cases_latent import latents
from tests.kernels.triton_cases_mixed import cases as mixed_steps
from tests.kernels.triton_cases_moe import experts, grouped_routes, norms, routes
from tests.kernels.triton_cases_pool import pools
from tests.kernels.triton_check import Case, Real, poisoned


def _gated() -> Iterator[Case]:
    for op in (swiglu, geglu):
        for num_tokens, size in ((1, 1), (3, 100), (2, 1500)):
            yield Case(
                f"{op.name}-{num_tokens}x{size}",
                op,
                lambda n=num_tokens, s=size: {"gate_up": Real(4 * torch.randn(n, 2 * s))},
            )


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _write_rows() -> Iterator[Case]:
    for n in (1, 700, 1500):

        def args(n: int = n) -> dict[str, Any]:
            num_slots = torch.randperm(2000)[:n]
            staged = torch.cat([num_slots.view(torch.int32), torch.randint(-9, 99, (n,), dtype=torch.int32)])
            return {"store": torch.arange(2000, dtype=torch.int32), "staged": staged}

        yield Case(f"write_rows-{n}", write_rows, args)


def _taps() -> Iterator[Case]:
    for n, size, sums in ((1, 576, False), (5, 48, True), (3, 7, False)):

        def args(n: int = n, size: int = size, sums: bool = sums) -> dict[str, Any]:
            parts = torch.randn(n, 3 * size)
            residual = Real(torch.randn(n, size)) if sums else None
            return {"hidden": Real(torch.randn(n, size)), "residual": residual, "out": Real(parts[:, size : 2 * size])}

        yield Case(f"tap-{n}x{size}", tap, args)


def _entropy() -> Iterator[Case]:
    for n, vocab_size in ((1, 5), (7, 300), (3, 5000)):

        def args(n: int = n, size: int = vocab_size) -> dict[str, Any]:
            return {"logits": Real(3 * torch.randn(n, size)), "target": Real(torch.randn(n, size).softmax(1))}

        yield Case(f"entropy_grads-{n}x{vocab_size}", entropy_grads, args)


def _rope() -> Iterator[Case]:
    sizes = (
        (1, 9, 3, 64, 64),
        (5, 4, 2, 16, 8),
        (7, 8, 1, 24, 24),
        (3, 0, 2, 16, 16),
    )  # without queries: to store only
    for num_tokens, heads, kv_heads, head_dim, rotary_dim in sizes:

        def turn(n: int = num_tokens, half: int = rotary_dim // 2) -> dict[str, Any]:
            table = torch.randn(40, 2, half)
            return {"cos_sin": table, "positions": torch.randint(0, 40, (n,)), "dtype": torch.float32}

        yield Case(f"rotation-{num_tokens}x{rotary_dim}", rotation, turn)

        def slots(n: int = num_tokens) -> dict[str, Any]:
            return {"slot_mapping": torch.randint(-1, 40, (n,)), "num_pages": 11, "page_size": 4}

        both = [turn, slots]
        yield Case(
            f"rotation_and_slots-{num_tokens}x{rotary_dim}",
            rotation_and_slots,
            lambda both=both: {**both[0](), **both[1]()},
        )

        def args(
            n: int = num_tokens, h: int = heads, kv: int = kv_heads, d: int = head_dim, r: int = rotary_dim
        ) -> dict[str, Any]:
            q, k, v = torch.randn(n, h + 2 * kv, d).split([h, kv, kv], dim=1)
            num_slots = torch.randperm(40)[:n]
            return {
                "q": Real(q),
                "k": Real(k),
                "v": Real(v),
                "cos": torch.randn(n, 1, r // 2).repeat(1, 1, 2),
                "sin": torch.randn(n, 1, r // 2).repeat(1, 1, 2) * torch.tensor([-1.0, 1.0]).repeat_interleave(r // 2),
                "kv_cache": Real(torch.randn(10, 2, kv, 4, d)),
                "page_ids": num_slots // 4,
                "offsets": num_slots % 4,
            }

        yield Case(f"rope_and_cache-{num_tokens}x{heads}x{head_dim}", rope_and_cache, args)


def _rows(num_rows: int, max_len: int) -> dict[str, Tensor]:
    num_tokens = torch.randint(2, max_len - 6, (num_rows,), dtype=torch.int32)
    status = torch.full((num_rows,), int(RowStatus.RUNNING), dtype=torch.int32)
    status[torch.rand(num_rows) < 0.3] = int(RowStatus.STOPPED)
    status[-1] = int(RowStatus.INERT)
    return {
        "token_ids": torch.randint(1, 999, (num_rows, max_len), dtype=torch.int32),
        "num_computed": (num_tokens * torch.rand(num_rows)).int(),
        "num_tokens": num_tokens,
        "num_drafts": torch.randint(0, 5, (num_rows,), dtype=torch.int32),
        "status": status,
    }


def _starts(counts: Tensor) -> Tensor:
    return _ints([0, *counts.cumsum(0).tolist()])


def _batch(num_rows: int, num_reqs: int, num_padding: int) -> Tensor:
    return _ints([*torch.randperm(num_rows - 1)[:num_reqs].tolist(), *[num_rows - 1] * num_padding])


def _prepare() -> Iterator[Case]:
    for num_reqs, num_padding, spare_tokens, max_pages in ((1, 0, 0, 3), (4, 3, 9, 1200), (6, 0, 2100, 30)):

        def args(n: int = num_reqs, pad: int = num_padding, spare: int = spare_tokens, p: int = max_pages) -> Any:
            rows = _rows(9, p * 4)
            batch = _batch(9, n, pad)
            known = (rows["num_tokens"] - rows["num_computed"])[batch.long()]
            num_slots = torch.randint(0, 4, (n + pad,)) * (torch.rand(n + pad) < 0.7)
            known[n:], num_slots[n:] = 0, 0
            logits = num_slots + (torch.arange(n + pad) < n)
            starts, total = _starts(known + num_slots), int((known + num_slots).sum()) + spare
            num_logits = int(logits.sum()) + min(spare, 5)
            return rows | {
                "batch_rows": batch,
                "query_start_loc": starts,
                "logit_start_loc": _starts(logits),
                "max_logits": 5,
                "page_table": torch.randint(1, 5000, (9, p), dtype=torch.int32),
                "page_size": 4,
                "input_ids": poisoned(total),
                "positions": poisoned(total, dtype=torch.int64),
                "slot_mapping": poisoned(total, dtype=torch.int64),
                "query_lens": poisoned(n + pad),
                "seq_lens": poisoned(n + pad),
                "block_table": poisoned(n + pad, p),
                "logit_indices": poisoned(num_logits, dtype=torch.int64),
                "logit_rows": poisoned(num_logits),
                "logit_positions": poisoned(num_logits),
                "logit_drafts": poisoned(num_logits),
            }

        yield Case(f"prepare_inputs-{num_reqs}+{num_padding}", prepare_inputs, args)


def _commit() -> Iterator[Case]:
    # New tokens, at most, and columns for them: a step without drafts fills the first alone.
    for num_reqs, num_padding, width, spare in ((1, 0, 1, 0), (6, 3, 1, 0), (6, 3, 2, 0), (6, 3, 5, 0), (6, 3, 1, 4)):

        def args(
            n: int = num_reqs, pad: int = num_padding, w: int = width, s: int = spare, f: bool = False
        ) -> dict[str, Any]:
            rows = _rows(9, 40)
            batch = _batch(9, n, pad)
            missing = (rows["num_tokens"] - rows["num_computed"])[batch.long()]
            draws = torch.rand(n + pad) < 0.6  # the others are chunks
            known = torch.where(draws, missing, missing - 1)
            num_slots = torch.randint(0, w, (n + pad,)) * draws
            known[n:], num_slots[n:] = 0, 0
            there = (num_slots * torch.rand(n + pad)).round().int()
            runs = rows["status"][batch.long()] == RowStatus.RUNNING
            return rows | {
                "new_ids": torch.randint(0, 6, (n + pad, w), dtype=torch.int32 if w > 1 else torch.int64),
                "num_accepted": (there * torch.rand(n + pad)).round().int(),
                "failed": torch.rand(n + pad) < 0.2,
                "would_be_accepted": torch.rand(n + int(num_slots.sum())) < 0.5 if f else None,
                "token_ids": torch.randint(0, 6, (9, 40), dtype=torch.int32),
                "batch_rows": batch,
                "query_start_loc": _starts(known + num_slots),
                "logit_start_loc": _starts(num_slots + (torch.arange(n + pad) < n)),
                "query_lens": torch.where(runs, known + there, 0).int(),
                "stop_ids": torch.randint(-1, 9, (9, 3), dtype=torch.int32),
                "max_total": rows["num_tokens"] + torch.randint(1, 4, (9,), dtype=torch.int32),
                "step_start": torch.zeros(9, dtype=torch.int32),
                "out": poisoned(n + pad, NUM_HEADER_COLUMNS + w + s),
            }

        for run in range(3):
            yield Case(f"commit-{num_reqs}+{num_padding}-{width}+{spare}-{run}", commit, args)
        yield Case(f"commit-{num_reqs}+{num_padding}-{width}+{spare}-forced", commit, partial(args, f=True))


class _Shape(NamedTuple):
    query_lens: list[int]
    seq_lens: list[int]  # 0 for a row that does not run
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    window: int = 0
    num_padding: int = 0  # requests; in a uniform batch tokens too
    query_len: int = 0  # of a uniform batch
    spare_tokens: int = 0
    num_unused: tuple[int, ...] = ()  # of each request's query tokens, the last so many are not alive
    seq_starts: tuple[int, ...] = ()  # what lies before is no number
    causal: bool = True


_ATTENTION = {
    "decode": _Shape([1, 1, 1], [1, 64, 65], query_len=1),
    "decode-long": _Shape([1, 1], [1100, 700], query_len=1, heads=3, kv_heads=1, head_dim=64, page_size=16),
    "decode-stopped-and-padded": _Shape([1, 1, 1], [130, 0, 200], query_len=1, num_padding=2),
    "decode-window": _Shape([1, 1, 1], [5, 300, 1300], query_len=1, window=100),
    "decode-odd-head": _Shape([1, 1], [90, 31], query_len=1, head_dim=24, heads=9, kv_heads=3),
    "verify": _Shape([4, 4, 4], [4, 129, 600], query_len=4, heads=6),
    "verify-window-padded": _Shape([3, 3], [200, 77], query_len=3, window=64, num_padding=1),
    "verify-few-drafts": _Shape([4, 4, 4], [1, 129, 602], query_len=4, heads=6, num_padding=1, num_unused=(3, 0, 2)),
    "verify-window-few-drafts": _Shape([3, 3], [200, 76], query_len=3, window=64, num_unused=(0, 1)),
    "verify-many-drafts": _Shape(
        [17, 17], [900, 17], query_len=17, heads=8, kv_heads=2, head_dim=32, num_unused=(0, 3)
    ),
    "verify-large-group": _Shape([6, 6], [300, 70], query_len=6, heads=16, kv_heads=1, head_dim=64, num_padding=1),
    "verify-too-many-rows": _Shape([17, 17], [90, 200], query_len=17, heads=8, kv_heads=1),
    "mixed-few-drafts": _Shape([4, 40, 4], [90, 100, 3], num_padding=1, spare_tokens=3, num_unused=(2, 0, 3)),
    "prefill": _Shape([70, 33], [70, 33]),
    "mixed": _Shape([1, 40, 1, 7], [90, 100, 3, 7], heads=6, kv_heads=2, head_dim=32, page_size=16),
    "mixed-stopped-and-padded": _Shape([1, 9, 5, 2], [50, 0, 80, 2], num_padding=3, spare_tokens=6),
    "mixed-window": _Shape([30, 1, 64], [200, 150, 64], window=33),
    "mixed-one-request": _Shape([20], [100]),
    "decode-wide-head": _Shape([1, 1], [70, 3], query_len=1, heads=2, kv_heads=1, head_dim=128, page_size=16),
    "decode-widest-head": _Shape([1], [70], query_len=1, heads=2, kv_heads=1, head_dim=256, page_size=16),
    "mixed-wide-head": _Shape([3, 1], [70, 9], heads=2, kv_heads=1, head_dim=128, page_size=16),
    "mixed-widest-head": _Shape([3, 1], [70, 9], heads=2, kv_heads=1, head_dim=256, page_size=16),
    "verify-widest-head": _Shape([4, 4], [70, 9], query_len=4, heads=16, kv_heads=2, head_dim=256, num_unused=(0, 2)),
    "mixed-widest-head-group": _Shape([9, 1], [70, 9], heads=16, kv_heads=2, head_dim=256, page_size=16),
    "mixed-large-group": _Shape([2, 1], [9, 5], heads=96, kv_heads=1),
    # First slots: none, at the border of a page or chunk, amidst one, the last of all, after the last.
    "decode-starts": _Shape([1] * 6, [1, 64, 65, 130, 200, 90], query_len=1, seq_starts=(0, 4, 64, 129, 37, 90)),
    "decode-long-starts": _Shape([1] * 3, [1300, 1100, 1100], query_len=1, page_size=16, seq_starts=(70, 1099, 0)),
    "decode-window-starts": _Shape(
        [1] * 5, [5, 300, 1300, 300, 90], query_len=1, window=100, seq_starts=(4, 250, 99, 201, 80)
    ),
    "decode-stopped-starts": _Shape([1] * 4, [130, 0, 60, 9], query_len=1, num_padding=2, seq_starts=(131, 7, 900, 0)),
    "verify-starts": _Shape(
        [4] * 5,
        [4, 129, 600, 66, 70],
        query_len=4,
        heads=6,
        num_unused=(0, 1, 0, 2, 0),
        seq_starts=(2, 128, 300, 0, 70),
    ),
    "verify-window-starts": _Shape([3, 3, 3], [200, 77, 64], query_len=3, window=64, seq_starts=(199, 14, 62)),
    "verify-too-many-rows-starts": _Shape([17, 17], [90, 200], query_len=17, heads=8, kv_heads=1, seq_starts=(80, 64)),
    "mixed-starts": _Shape(
        [1, 40, 1, 150, 3], [90, 100, 3, 200, 3], num_padding=1, spare_tokens=2, seq_starts=(64, 77, 2, 128, 3)
    ),
    "mixed-window-starts": _Shape([30, 1, 64], [200, 150, 64], window=33, seq_starts=(180, 100, 40)),
    # All query tokens of a request see each other.
    "verify-block": _Shape([4] * 4, [4, 129, 600, 66], query_len=4, heads=6, num_unused=(0, 1, 0, 2), causal=False),
    "verify-block-starts": _Shape([5] * 3, [5, 300, 70], query_len=5, seq_starts=(0, 270, 64), causal=False),
    "verify-too-many-rows-block": _Shape([17, 17], [90, 200], query_len=17, heads=8, kv_heads=1, causal=False),
    "mixed-block": _Shape([1, 40, 5, 150, 3], [90, 100, 5, 200, 0], num_padding=1, spare_tokens=2, causal=False),
    "mixed-wide-head-starts": _Shape([3, 1], [70, 9], heads=2, kv_heads=1, head_dim=128, seq_starts=(68, 4)),
}


def _attention() -> Iterator[Case]:
    for name, shape in _ATTENTION.items():

        def args(s: _Shape = shape) -> dict[str, Any]:
            num_tokens = sum(s.query_lens) + s.num_padding * s.query_len + s.spare_tokens
            num_reqs = len(s.query_lens) + s.num_padding
            max_pages = -(-max(s.seq_lens) // s.page_size)
            num_pages = num_reqs * max_pages + 1
            cache = torch.randn(num_pages, 2, s.kv_heads, s.page_size, s.head_dim)
            cache[0] = 0
            table = 1 + torch.randperm(num_pages - 1).view(num_reqs, max_pages).int()
            for i, seq_len in enumerate([*s.seq_lens, *[0] * s.num_padding]):
                # Slots after the last token must not be read, and page 0 may be.
                pages, offset = divmod(seq_len, s.page_size)
                if offset:
                    cache[table[i, pages], :, :, offset:] = float("nan")
                table[i, pages + bool(offset) :] = 0
            starts = torch.tensor([0, *s.query_lens]).cumsum(0).int()
            starts = torch.cat([starts, starts[-1:].repeat(s.num_padding)])
            q, seq_lens = torch.randn(num_tokens, s.heads, s.head_dim), _ints([*s.seq_lens, *[0] * s.num_padding])
            alive = [
                n - unused for n, unused in zip(s.query_lens, s.num_unused or [0] * len(s.query_lens), strict=True)
            ]
            query_lens = _ints([*alive, *[0] * s.num_padding])
            seq_starts = None
            if s.seq_starts:
                seq_starts = _ints([*s.seq_starts, *[500] * s.num_padding])
                plant_nan(cache, table, seq_starts)
                hide_queries(q, starts, query_lens, seq_lens, seq_starts)
            return {
                "q": Real(q),
                "kv_cache": Real(cache),
                "query_start_loc": starts,
                "query_lens": query_lens,
                "seq_lens": seq_lens,
                "block_table": table,
                "scale": s.head_dim**-0.5,
                "window": s.window,
                "query_len": s.query_len,
                "seq_starts": seq_starts,
                "causal": s.causal,
            }

        yield Case(f"attention-{name}", triton_attention, args)


def _exact_attention() -> Iterator[Case]:
    for case in _attention():
        shape = _ATTENTION[case.name.removeprefix("attention-")]
        if not shape.seq_starts and shape.causal:

            def args(draw: Callable[[], dict[str, Any]] = case.args) -> dict[str, Any]:
                return {name: value for name, value in draw().items() if name != "causal"}

            yield Case(f"exact_{case.name}", exact_attention, args)


CASES = [
    *(
        *_gated(),
        *_write_rows(),
        *_rope(),
        *_entropy(),
        *_taps(),
        *_prepare(),
        *_commit(),
        *_attention(),
        *_exact_attention(),
        *exact_products(),
        *norms(),
        *routes(),
        *grouped_routes(),
        *experts(),
    ),
    *(*products(), *decodes(), *head_passes(), *cascades()),
    *(*convolutions(), *recurrences(), *chunks(), *gated_norms()),
    *encoded_pages(),
    *cross_attention(),
    *pools(),
    *encoders(),
    *latents(),
    *indexers(),
    *mixed_steps(),
]
