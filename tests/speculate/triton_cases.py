"""Odd batches for the small kernels around drafts, with the cases of the search and of rejection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.plan import RowStatus
from slipstream.speculate.block_inputs import prepare_blocks
from slipstream.speculate.draft_gaps import mark_gaps
from slipstream.speculate.draft_inputs import prepare_first_pass, prepare_shifted_pass
from slipstream.speculate.draft_notes import write_notes
from slipstream.speculate.next_pass_inputs import prepare_next_pass
from slipstream.speculate.place_certain_drafts import place_certain_drafts
from slipstream.speculate.place_drafts import place_drafts
from slipstream.speculate.read_drafts import read_drafts
from slipstream.speculate.synthetic import force_acceptance
from slipstream.speculate.verify import accept_drafts
from tests.kernels.triton_check import Case, poisoned
from tests.speculate.triton_cases_ngram import CASES as NGRAM_CASES
from tests.speculate.triton_cases_rejection import CASES as REJECTION_CASES

NUM_ROWS = 9


def ints(values: Any) -> Tensor:
    return torch.as_tensor(values).int()


def starts(counts: Tensor) -> Tensor:
    return ints([0, *counts.cumsum(0).tolist()])


def draw_rows(max_len: int, page_size: int) -> dict[str, Tensor]:
    """Rows of which most have one token left to compute, as those that decode do; the last is scratch."""
    num_tokens = torch.randint(6, max_len - 9, (NUM_ROWS,))
    num_left = torch.where(torch.rand(NUM_ROWS) < 0.7, 1, torch.randint(2, 5, (NUM_ROWS,)))
    status = torch.full((NUM_ROWS,), int(RowStatus.RUNNING))
    status[torch.rand(NUM_ROWS) < 0.2] = int(RowStatus.STOPPED)
    num_tokens[-1], num_left[-1], status[-1] = 0, 0, int(RowStatus.INERT)
    return {
        "token_ids": ints(torch.randint(1, 999, (NUM_ROWS, max_len))),
        "page_table": ints(torch.randint(1, 5000, (NUM_ROWS, max_len // page_size))),
        "num_computed": ints(num_tokens - num_left),
        "num_tokens": ints(num_tokens),
        "num_drafts": ints(torch.randint(0, 5, (NUM_ROWS,))),
        "max_drafts": ints(torch.randint(0, 6, (NUM_ROWS,))),
        "max_total": ints(num_tokens + torch.randint(1, 9, (NUM_ROWS,))),
        "status": ints(status),
        "step_start": ints(torch.rand(NUM_ROWS) < 0.8) * ints(torch.arange(NUM_ROWS) < NUM_ROWS - 1),
    }


def batch_of(num_reqs: int, num_padding: int) -> Tensor:
    return ints([*torch.randperm(NUM_ROWS - 1)[:num_reqs].tolist(), *[NUM_ROWS - 1] * num_padding])


def chosen(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _accept() -> Iterator[Case]:
    for num_reqs, width, forced in ((1, 2, False), (6, 4, False), (6, 5, True)):

        def args(n: int = num_reqs, w: int = width, f: bool = forced) -> dict[str, Any]:
            counts = torch.randint(0, w + 1, (n,))
            total = int(counts.sum()) + 3
            return {
                "target_ids": torch.randint(0, 3, (total,)),
                "draft_ids": ints(torch.randint(-1, 3, (total,))),
                "accepted": torch.rand(total) < 0.7 if f else None,
                "failed": torch.rand(total) < 0.1,
                "logit_start_loc": starts(counts),
                "width": w,
            }

        yield from (Case(f"accept_drafts-{num_reqs}x{width}-{run}", accept_drafts, args) for run in range(3))


def _place() -> Iterator[Case]:
    for num_reqs, num_padding, k in ((1, 0, 1), (6, 2, 3), (8, 0, 5)):

        def args(n: int = num_reqs, pad: int = num_padding, k: int = k) -> dict[str, Any]:
            rows = draw_rows(40, 4)
            names = ("num_computed", "num_tokens", "max_drafts", "max_total", "status", "token_ids", "num_drafts")
            return {
                # Columns of a wider table: steps may make fewer drafts than there is room for.
                "draft_ids": ints(torch.randint(-1, 9, (n + pad, k + 2)))[:, :k],
                "batch_rows": batch_of(n, pad),
                **chosen(rows, *names),
            }

        yield from (Case(f"place_drafts-{num_reqs}x{k}-{run}", place_drafts, args) for run in range(2))


def _place_certain() -> Iterator[Case]:
    for num_reqs, k in ((1, 1), (6, 3), (8, 5)):

        def args(n: int = num_reqs, k: int = k, last: bool = False) -> dict[str, Any]:
            # Few tokens, so that some runs begin as the drafts do.
            rows = draw_rows(40, 4) | {"token_ids": ints(torch.randint(0, 4, (NUM_ROWS, 40)))}
            names = ("num_computed", "num_tokens", "max_drafts", "max_total", "status", "token_ids", "num_drafts")
            return {
                "runs": ints(torch.cat([torch.randint(-1, 2, (n, 1)), torch.randint(-1, 4, (n, k))], 1)),
                "num_accepted": ints(torch.randint(0, 2, (n, 4)))[:, 2],
                "goes_over_last": last,
                "batch_rows": batch_of(n, 0),
                **chosen(rows, *names),
            }

        for run in range(6):
            made = partial(args, last=run % 2 == 1)
            yield Case(f"place_certain_drafts-{num_reqs}x{k}-{run}", place_certain_drafts, made)


def _read() -> Iterator[Case]:
    for num_reqs, num_padding, k in ((1, 0, 1), (6, 2, 3), (8, 0, 5)):

        def args(n: int = num_reqs, pad: int = num_padding, k: int = k) -> dict[str, Any]:
            rows = draw_rows(40, 4)
            return {
                "batch_rows": batch_of(n, pad),
                "out": torch.full((n + pad, k), 0x7FF17FF1, dtype=torch.int32),
                **chosen(rows, "num_tokens", "num_drafts", "token_ids"),
            }

        yield Case(f"read_drafts-{num_reqs}x{k}", read_drafts, args)


def _gaps() -> Iterator[Case]:
    for num_reqs, num_padding, whole in ((1, 0, True), (5, 3, True), (7, 1, False)):

        def args(n: int = num_reqs, pad: int = num_padding, w: bool = whole) -> dict[str, Any]:
            rows = draw_rows(48, 4)
            first = rows["num_computed"] - ints(torch.randint(0, 4, (NUM_ROWS,)))
            return {
                "batch_rows": batch_of(n, pad),
                "num_computed": rows["num_computed"],
                "step_start": rows["step_start"] * (first.clamp(min=0) + 1),
                "goes_over_all": w,
                "num_caught_up": 0 if w else 2,
                "draft_start": ints(torch.randint(0, 3, (NUM_ROWS,))),
                "draft_end": first - ints(torch.randint(0, 5, (NUM_ROWS,))),
                "seq_starts": poisoned(n + pad),
                "first_slots": poisoned(n + pad),
            }

        yield Case(f"mark_gaps-{num_reqs}+{num_padding}", mark_gaps, args)


def _notes() -> Iterator[Case]:
    for num_reqs, num_padding, width, step in ((1, 0, 96, 0), (5, 3, 1728, 13), (8, 0, 5000, 3), (8, 0, 96, 40)):

        def args(n: int = num_reqs, pad: int = num_padding, w: int = width, at: int = step) -> dict[str, Any]:
            rows, batch, size, longs = draw_rows(60, 4), batch_of(n, pad), 17 * 9, {"dtype": torch.int64}
            is_there = (rows["step_start"][batch.long()] > 0) & (torch.arange(n + pad) < n)
            # Most have sampled a token after this one.
            num_after = 1 + ints(torch.rand(n + pad) < 0.8)
            position = (rows["num_tokens"][batch.long()] - num_after) * is_there
            # Some began with this step; those that ended before it have no slot.
            begun = torch.where(torch.rand(n + pad) < 0.8, position - at, -1)
            return {
                "batch_rows": batch,
                **chosen(rows, "token_ids", "num_computed", "num_tokens"),
                "step_start": ints(torch.where(rows["step_start"] > 0, rows["num_computed"], 0)),
                "positions": position.long(),
                "slots": torch.where(is_there, torch.randint(0, 99, (n + pad,)), -1),
                "features": torch.randn(n + pad, w),
                "most": 16,
                "first": ints(begun),
                "draft_start": ints(torch.randint(0, 3, (NUM_ROWS,))),
                "draft_end": ints(rows["num_computed"] - torch.randint(0, 3, (NUM_ROWS,))),
                "noted_ids": poisoned(size),
                **{name: poisoned(size, **longs) for name in ("noted_positions", "noted_slots")},
                "noted_features": torch.zeros(size, w),
            }

        yield Case(f"write_notes-{num_reqs}+{num_padding}x{width}-{step}", write_notes, args)


def _first_pass() -> Iterator[Case]:
    for num_reqs, num_padding, spare, max_len in ((1, 0, 0, 24), (5, 3, 9, 48), (8, 0, 2100, 4800)):

        def args(n: int = num_reqs, pad: int = num_padding, s: int = spare, m: int = max_len) -> dict[str, Any]:
            rows, batch = draw_rows(m, 4), batch_of(n, pad)
            known = torch.minimum(torch.randint(1, m // 2, (n + pad,)), rows["num_computed"][batch.long()])
            # Some go back by up to three tokens, for which all have slots.
            counts = torch.where(torch.arange(n + pad) < n, known + 1 + 3, 0)
            back = rows["num_computed"][batch.long()] - known - torch.randint(0, 4, (n + pad,))
            first_slots = torch.where(torch.rand(n + pad) < 0.5, back.clamp(min=0), -1)
            total = int(counts.sum()) + s
            names = ("token_ids", "page_table", "num_computed", "num_tokens", "max_drafts", "step_start")
            return {
                "batch_rows": batch,
                "start_loc": starts(counts),
                **chosen(rows, *names),
                "first_slots": ints(first_slots),
                "num_caught_up": 3,
                "page_size": 4,
                "vocab_size": 900,
                "input_ids": poisoned(total),
                "positions": poisoned(total, dtype=torch.int64),
                "slot_mapping": poisoned(total, dtype=torch.int64),
                **{name: poisoned(n + pad) for name in ("query_lens", "seq_lens", "draft_positions")},
                "last_indices": poisoned(n + pad, dtype=torch.int64),
                "block_table": poisoned(n + pad, m // 4),
            }

        yield from (
            Case(f"prepare_first_pass-{num_reqs}+{num_padding}-{r}", prepare_first_pass, args) for r in range(2)
        )


def _shifted_pass() -> Iterator[Case]:
    for num_reqs, num_padding, spare, max_len in ((1, 0, 0, 24), (5, 3, 9, 48), (8, 0, 2100, 4800)):

        def args(n: int = num_reqs, pad: int = num_padding, s: int = spare, m: int = max_len) -> dict[str, Any]:
            rows, batch = draw_rows(m, 4), batch_of(n, pad)
            computed = rows["num_computed"][batch.long()]
            known = torch.minimum(torch.randint(1, m // 2, (n + pad,)), computed)
            # Some of the tokens after the computed ones are rejected drafts.
            counts = torch.where(torch.arange(n + pad) < n, known + torch.randint(0, 4, (n + pad,)), 0)
            begins = starts(counts)
            positions = torch.zeros(int(counts.sum()) + s, dtype=torch.int64)
            for i in range(n):
                positions[begins[i] : begins[i + 1]] = (computed - known)[i] + torch.arange(int(counts[i]))
            names = ("token_ids", "page_table", "num_computed", "num_tokens", "step_start")
            return {
                "batch_rows": batch,
                "query_start_loc": begins,
                "positions": positions,
                **chosen(rows, *names),
                "input_ids": poisoned(len(positions)),
                "last_indices": poisoned(n + pad, dtype=torch.int64),
                "draft_positions": poisoned(n + pad),
                "block_table": poisoned(n + pad, m // 4),
            }

        name = f"prepare_shifted_pass-{num_reqs}+{num_padding}"
        yield from (Case(f"{name}-{run}", prepare_shifted_pass, args) for run in range(2))


def _next_pass() -> Iterator[Case]:
    for num_reqs, num_padding, idx in ((1, 0, 1), (6, 2, 1), (8, 0, 4)):

        def args(n: int = num_reqs, pad: int = num_padding, idx: int = idx) -> dict[str, Any]:
            names = ("page_table", "num_computed", "num_tokens", "max_drafts", "max_total", "status")
            return {
                "last_draft": ints(torch.randint(-1, 9, (n + pad, 5)))[:, 2],
                "idx": idx,
                "batch_rows": batch_of(n, pad),
                **chosen(draw_rows(48, 4), *names),
                "page_size": 4,
                "slots_before": idx % 2,
                **{name: poisoned(n + pad) for name in ("input_ids", "query_lens", "seq_lens", "draft_positions")},
                **{name: poisoned(n + pad, dtype=torch.int64) for name in ("positions", "slot_mapping")},
            }

        yield from (Case(f"prepare_next_pass-{num_reqs}-{idx}-{r}", prepare_next_pass, args) for r in range(2))


def _blocks() -> Iterator[Case]:
    for num_reqs, num_padding, length in ((1, 0, 1), (6, 2, 5), (8, 0, 16)):

        def args(n: int = num_reqs, pad: int = num_padding, length: int = length) -> dict[str, Any]:
            names = ("token_ids", "page_table", "num_computed", "num_tokens", "max_drafts", "max_total", "status")
            rows, places = draw_rows(48, 4), max(1, length - 1)
            tokens, drafts = (n + pad) * length, (n + pad) * places
            return {
                "batch_rows": batch_of(n, pad),
                **chosen(rows, *names),
                "length": length,
                "num_places": places,
                "mask_id": 7,
                "page_size": 4,
                "input_ids": poisoned(tokens),
                **{name: poisoned(tokens, dtype=torch.int64) for name in ("positions", "slot_mapping")},
                **{name: poisoned(n + pad) for name in ("query_lens", "seq_lens")},
                "block_table": poisoned(n + pad, rows["page_table"].shape[1]),
                **{name: poisoned(drafts) for name in ("draft_rows", "draft_positions")},
            }

        yield from (Case(f"prepare_blocks-{num_reqs}-{length}-{r}", prepare_blocks, args) for r in range(2))


def _synthetic() -> Iterator[Case]:
    for n, k in ((1, 1), (300, 3)):

        def args(n: int = n, k: int = k) -> dict[str, Any]:
            rows = ints(torch.randint(0, NUM_ROWS, (n,)))
            num_tokens = ints(torch.randint(0, 2**30, (NUM_ROWS,)))
            return {
                "logit_rows": rows,
                "positions": num_tokens[rows] + ints(torch.randint(0, k + 1, (n,))),
                "num_tokens": num_tokens,
                "seeds": ints(torch.randint(-(2**31), 2**31, (NUM_ROWS, 2))),
                "choice": ints(torch.randint(0, 9, (NUM_ROWS,))),
                "rates": torch.rand(k).sort(descending=True).values,
            }

        yield Case(f"force_acceptance-{n}x{k}", force_acceptance, args)


SMALL_CASES = [
    *_accept(),
    *_place(),
    *_place_certain(),
    *_read(),
    *_gaps(),
    *_notes(),
    *_first_pass(),
    *_shifted_pass(),
    *_next_pass(),
    *_blocks(),
    *_synthetic(),
]
CASES = [*SMALL_CASES, *NGRAM_CASES, *REJECTION_CASES]
