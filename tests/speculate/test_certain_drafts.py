"""Tokens that are certain become drafts: row by row against a definition in plain Python, and through the engine."""

from __future__ import annotations

import torch

from slipstream.plan import RowStatus
from slipstream.speculate.place_certain_drafts import place_certain_drafts
from tests.bundles import bundle
from tests.speculate.triton_cases import SMALL_CASES


def test_a_run_replaces_drafts_that_differ_and_no_others() -> None:
    torch.manual_seed(1)
    num_placed = num_kept = 0
    for case in SMALL_CASES:
        if case.op is not place_certain_drafts:
            continue
        for _ in range(20):
            args = case.args()
            before = {name: value.clone() for name, value in args.items() if name != "goes_over_last"}
            place_certain_drafts(**bundle(place_certain_drafts, args))
            in_batch = dict(zip(before["batch_rows"].tolist(), range(len(before["batch_rows"])), strict=True))
            for row in range(len(before["num_tokens"])):
                length, had = int(before["num_tokens"][row]), int(before["num_drafts"][row])
                drafts, run = before["token_ids"][row, length : length + had].tolist(), list[int]()
                is_ready = before["num_computed"][row] + 1 == length and before["status"][row] == RowStatus.RUNNING
                if row in in_batch and is_ready:
                    needed, *tokens = before["runs"][in_batch[row]].tolist()
                    if needed == before["num_accepted"][in_batch[row]]:
                        run = tokens[: tokens.index(-1)] if -1 in tokens else tokens
                room = min(int(before["max_drafts"][row]), int(before["max_total"][row]) - length - 1)
                run = run[: max(0, room)]
                if args["goes_over_last"] and run:  # up to the first that the drafter has not been through
                    seen = [*drafts[:-1], None]
                    run = run[: 1 + next(i for i, token in enumerate([*run, -1]) if i >= len(seen) or token != seen[i])]
                shared = min(len(run), len(drafts))
                keeps = drafts[:shared] == run[:shared] and len(drafts) >= len(run)
                expected = drafts if keeps else run
                count = int(args["num_drafts"][row])
                assert args["token_ids"][row, length : length + count].tolist() == expected
                others = torch.ones(args["token_ids"].shape[1], dtype=torch.bool)
                others[length : length + max(count, had)] = False
                assert torch.equal(args["token_ids"][row, others], before["token_ids"][row, others])
                num_placed += bool(run) and not keeps
                num_kept += bool(run) and keeps
    assert num_placed > 50 and num_kept > 5
