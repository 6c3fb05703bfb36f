"""Odd vocabularies, ties, bad rows and poisoned memory for the kernels of sampling; run interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.sampling.draw import draw_drafts, draw_tokens
from slipstream.sampling.mask import apply_mask
from slipstream.sampling.penalties import apply_penalties
from slipstream.sampling.suppress_tokens import suppress_tokens
from slipstream.sampling.timestamp_rules import apply_timestamp_rules
from slipstream.sampling.top_k import apply_top_k
from slipstream.sampling.top_n_sigma import apply_top_n_sigma
from slipstream.sampling.top_p import apply_top_p
from tests.kernels.triton_check import POISON, Case, Real

VOCABULARIES = (1, 5, 1000, 5003)


def grid_logits(n: int, vocab_size: int) -> Tensor:
    """Numbers that every float type holds, so that ties are at the same columns, with some tokens forbidden."""
    logits = (torch.randn(n, vocab_size) * 64).round().clamp(-256, 256) / 32
    if vocab_size > 4:
        logits[torch.rand(n, vocab_size) < 0.1] = -torch.inf
    return logits


def spoilt(logits: Tensor) -> Tensor:
    """One row each with NaN, +inf and nothing finite, wherever there are that many."""
    middle = logits.shape[1] // 2
    for row, bad in ((1, torch.nan), (2, torch.inf)):
        logits[row : row + 1, middle] = bad
    logits[3:4] = -torch.inf
    return logits


def some_ids(count: int, vocab_size: int) -> Tensor:
    """The target's tokens that a drafter knows."""
    return torch.randperm(vocab_size)[:count].sort().values.int()


def draw_args(logits: Tensor, noise: bool, scaled: bool = False) -> dict[str, Any]:
    n = len(logits)
    num_rows = n + 3
    temperature = torch.rand(num_rows) + 0.2
    temperature[torch.rand(num_rows) < 0.4] = 0.0
    positions = torch.randint(0, 2**31, (n,), dtype=torch.int32)
    positions[0] = 2**31 - 1
    return {
        "logits": Real(logits),
        "batch_rows": torch.randperm(num_rows)[:n].int(),
        "temperature": temperature,
        "seeds": torch.randint(-(2**31), 2**31, (num_rows, 2)).int(),
        "positions": positions,
        "choice": torch.randint(0, 9, (num_rows,), dtype=torch.int32),
        "noise": noise,
        "scaled": scaled,
    }


def _draws() -> Iterator[Case]:
    shapes = ((1, 1), (6, 1), (6, 5), (6, 1000), (1, 5003), (6, 5003), (2, 20_011))
    for n, vocab_size in shapes:
        for noise, scaled in ((False, False), (True, False), (True, True)):
            yield Case(
                f"draw_tokens-{n}x{vocab_size}-noise{noise:d}-scaled{scaled:d}",
                draw_tokens,
                lambda n=n, v=vocab_size, noise=noise, scaled=scaled: draw_args(
                    spoilt(grid_logits(n, v)), noise, scaled
                ),
            )
    # Tokens far apart in different blocks tie for the maximum.
    yield Case(
        "draw_tokens-ties",
        draw_tokens,
        lambda: draw_args(torch.ones(3, 9000).index_fill_(1, torch.arange(2500), 0.0), False),
    )
    # Every second entry of wider rows.
    yield Case("draw_tokens-strided", draw_tokens, lambda: draw_args(torch.randn(3, 200)[:, ::2], True))
    yield from _reduced_draws()


def reduced_draw_args(n: int, count: int, vocab_size: int, noise: bool, scaled: bool = False) -> dict[str, Any]:
    logits, target_ids = spoilt(grid_logits(n, count)), some_ids(count, vocab_size)
    return {**draw_args(logits, noise, scaled), "target_ids": target_ids}


# Rows, columns of the drafter, and tokens of the target.
REDUCED = ((1, 1, 1), (6, 1, 9), (6, 7, 9), (6, 300, 512), (6, 4097, 5000), (2, 20_011, 150_001))


def _reduced_draws() -> Iterator[Case]:
    for n, count, vocab_size in REDUCED:
        for noise, scaled in ((False, False), (True, False), (True, True)):
            yield Case(
                f"draw_tokens-{n}x{count}-of-{vocab_size}-noise{noise:d}-scaled{scaled:d}",
                draw_tokens,
                lambda shape=(n, count, vocab_size), noise=noise, scaled=scaled: reduced_draw_args(
                    *shape, noise, scaled
                ),
            )


def draft_args(args: dict[str, Any], num_drafts: int, idx: int, keeps: bool) -> dict[str, Any]:
    """The same draw, of draft ``idx`` of so many."""
    args = {name: value for name, value in args.items() if name != "scaled"}
    n, num_columns = args["logits"].tensor.shape
    ids = torch.full((n, num_drafts), POISON, dtype=torch.int32)
    kept = torch.randn(args["temperature"].shape[0], num_drafts, num_columns)[:, idx] if keeps else None
    extra = {"purpose": 1, "target_ids": args.get("target_ids"), "draft_ids": ids[:, idx], "kept_logits": kept}
    return {**args, **extra}


def comparable(args: dict[str, Any]) -> dict[str, Any]:
    """NaN is as bad as +inf, but equals nothing when it is kept."""
    logits = args["logits"].tensor.nan_to_num(torch.inf, torch.inf, -torch.inf)
    return args if args["kept_logits"] is None else {**args, "logits": Real(logits)}


def _drafts() -> Iterator[Case]:
    for n, count, vocab_size in REDUCED:
        for noise, keeps in ((False, False), (True, False), (True, True)):
            yield Case(
                f"draw_drafts-{n}x{count}-of-{vocab_size}-noise{noise:d}-keeps{keeps:d}",
                draw_drafts,
                lambda shape=(n, count, vocab_size), noise=noise, keeps=keeps: comparable(
                    draft_args(reduced_draw_args(*shape, noise), 3, 1, keeps)
                ),
            )
    yield Case(
        "draw_drafts-whole-vocabulary",
        draw_drafts,
        lambda: comparable(draft_args(draw_args(spoilt(grid_logits(6, 5003)), True), 1, 0, True)),
    )


def _top_k() -> Iterator[Case]:
    for vocab_size in VOCABULARIES:

        def args(v: int = vocab_size) -> dict[str, Any]:
            logits = grid_logits(6, v)
            logits[5] = -torch.inf
            return {"logits": Real(logits), "top_k": torch.tensor([0, 1, v // 2, v - 1, 2 * v, 2]).int()}

        yield Case(f"top_k-{vocab_size}", apply_top_k, args)
    yield Case(
        "top_k-one-row", apply_top_k, lambda: {"logits": Real(torch.randn(1, 5003)), "top_k": torch.tensor([50]).int()}
    )
    zeros = [0.0, -0.0, 0.0, -0.0, 1.0, -1.0]
    yield Case(
        "top_k-signed-zeros",
        apply_top_k,
        lambda: {"logits": Real(torch.tensor([zeros])), "top_k": torch.tensor([2]).int()},
    )


def safe_p(logits: Tensor, expected: float) -> float:
    """Near what is expected, but half a token away from where the answer changes."""
    probs = logits.double().softmax(0).sort(descending=True).values
    before = probs.cumsum(0) - probs
    last = int((before < expected).sum()) - 1
    assert probs[last] > 4e-5
    return float(before[last] + probs[last] / 2)


def safe_sigma(logits: Tensor, expected: float) -> float:
    """Near what is expected, but in the middle between two logits."""
    allowed = logits[torch.isfinite(logits)].double().unique()
    distances = ((allowed[-1] - allowed) / logits[torch.isfinite(logits)].double().std(correction=0)).sort().values
    if len(distances) < 2 or not torch.isfinite(distances).all():
        return expected
    middles = (distances[1:] + distances[:-1]) / 2
    return float(middles[(middles - expected).abs().argmin()])


def _top_n_sigma() -> Iterator[Case]:
    for vocab_size in (*VOCABULARIES, 20_011):

        def args(v: int = vocab_size) -> dict[str, Any]:
            logits = grid_logits(6, v)
            logits[:, 0] = 1.0  # nothing finite is a row of its own
            logits[5] = -torch.inf
            expected = (1.0, 0.3, 2.5)
            n = [*(safe_sigma(row, n) for row, n in zip(logits, expected, strict=False)), 0.0, 100.0, 1.0]
            return {"logits": Real(logits), "top_n_sigma": torch.tensor(n)}

        yield Case(f"top_n_sigma-{vocab_size}", apply_top_n_sigma, args)
    yield Case(
        "top_n_sigma-all-alike",
        apply_top_n_sigma,
        lambda: {"logits": Real(torch.full((2, 5003), 2.5)), "top_n_sigma": torch.tensor([1.0, 0.0])},
    )


def _top_p() -> Iterator[Case]:
    for vocab_size in VOCABULARIES:

        def args(v: int = vocab_size) -> dict[str, Any]:
            logits = grid_logits(6, v)
            logits[:, 0] = 1.0  # nothing finite is a row of its own
            logits[5] = -torch.inf
            logits[3, -1] = -200.0  # off is off, also for what has no mass
            expected = (0.5, 0.9, 0.2)
            top_p = [*(safe_p(row, p) for row, p in zip(logits, expected, strict=False)), 1.0, 0.0, 0.5]
            return {"logits": Real(logits), "top_p": torch.tensor(top_p)}

        yield Case(f"top_p-{vocab_size}", apply_top_p, args)
    # All alike: half the tokens stay, and it is the lower half, which ends in the second block.
    yield Case(
        "top_p-all-alike",
        apply_top_p,
        lambda: {"logits": Real(torch.full((1, 10_001), 2.5)), "top_p": torch.full((1,), 0.5)},
    )


def penalty_args(n: int, vocab_size: int, max_len: int) -> dict[str, Any]:
    num_rows = n + 2
    token_ids = torch.randint(0, vocab_size, (num_rows, max_len), dtype=torch.int32)
    positions = torch.randint(0, max_len - 9, (n,), dtype=torch.int32)
    batch_rows = torch.randint(0, num_rows, (n,)).int()  # a row may have several: one after each draft
    # The definition reads up to the length of the longest row of the batch; nothing may read further.
    token_ids[:, int(positions.max()) :] = POISON << 16
    repetition = torch.rand(num_rows) + 0.6
    frequency, presence = torch.randn(2, num_rows)
    for factor, off in ((repetition, 1.0), (frequency, 0.0), (presence, 0.0)):
        factor[torch.rand(num_rows) < 0.4] = off
    return {
        "logits": Real(grid_logits(n, vocab_size)),
        "batch_rows": batch_rows,
        "token_ids": token_ids,
        "positions": positions,
        "prompt_len": torch.randint(0, max_len, (num_rows,), dtype=torch.int32),
        "repetition": repetition,
        "frequency": frequency,
        "presence": presence,
    }


def _penalties() -> Iterator[Case]:
    for vocab_size, max_len in ((1, 40), (5, 17), (1000, 300), (5003, 40_000)):
        for n in (1, 5):
            yield Case(
                f"penalties-{n}x{vocab_size}",
                apply_penalties,
                lambda n=n, v=vocab_size, m=max_len: penalty_args(n, v, m),
            )


def suppress_args(n: int, vocab_size: int) -> dict[str, Any]:
    num_rows = n + 2
    counts = torch.stack([torch.randint(0, 257, (num_rows,)), torch.randint(0, 17, (num_rows,))], 1).int()
    counts[1] = 0
    ids = {"suppressed": 256, "at_begin": 16}
    return {
        "logits": Real(grid_logits(n, vocab_size)),
        "batch_rows": torch.randint(0, num_rows, (n,)).int(),
        "positions": torch.randint(3, 9, (n,), dtype=torch.int32),
        "prompt_len": torch.randint(3, 9, (num_rows,), dtype=torch.int32),
        "counts": counts,
        **{name: torch.randint(0, vocab_size, (num_rows, width)).int() for name, width in ids.items()},
    }


def _suppressed() -> Iterator[Case]:
    for vocab_size in VOCABULARIES:
        for n in (1, 5):
            yield Case(
                f"suppress_tokens-{n}x{vocab_size}", suppress_tokens, lambda n=n, v=vocab_size: suppress_args(n, v)
            )


def timestamp_args(n: int, vocab_size: int, max_len: int) -> dict[str, Any]:
    """Rows whose outputs are text and times in any order, and one row in four without rules."""
    num_rows = n + 2
    first = vocab_size // 2 + 2
    rules = torch.tensor([first, first - 1, first - 3, first + vocab_size // 8]).expand(num_rows, 4).clone().int()
    rules[::4] = 0
    token_ids = torch.randint(0, first, (num_rows, max_len), dtype=torch.int32)
    is_time = torch.rand(num_rows, max_len) < 0.4
    token_ids[is_time] = torch.randint(first, vocab_size, (int(is_time.sum()),), dtype=torch.int32)
    positions = torch.randint(0, max_len, (n,), dtype=torch.int32)
    logits = grid_logits(n, vocab_size)
    logits[::2, first:] += 2.0
    return {
        "logits": Real(logits),
        "batch_rows": torch.randint(0, num_rows, (n,)).int(),
        "positions": positions,
        "token_ids": token_ids,
        "prompt_len": torch.randint(0, max_len, (num_rows,), dtype=torch.int32),
        "rules": rules,
    }


def _timestamps() -> Iterator[Case]:
    for vocab_size, max_len in ((12, 3), (200, 12), (5003, 700)):
        for n in (1, 20):
            yield Case(
                f"timestamp_rules-{n}x{vocab_size}",
                apply_timestamp_rules,
                lambda n=n, v=vocab_size, m=max_len: timestamp_args(n, v, m),
            )


def _masks() -> Iterator[Case]:
    for n, vocab_size in ((1, 1), (6, 31), (6, 33), (4, 5003), (3, 9000)):

        def args(n: int = n, v: int = vocab_size) -> dict[str, Any]:
            pool = torch.randint(-(2**31), 2**31, (5, -(-v // 32))).int()
            rows = torch.randint(-1, 5, (n,)).int()
            rows[0] = -1 if n > 1 else 0
            return {"logits": Real(grid_logits(n, v)), "pool": pool, "rows": rows}

        yield Case(f"apply_mask-{n}x{vocab_size}", apply_mask, args)


CASES = [
    *_masks(),
    *_draws(),
    *_drafts(),
    *_top_n_sigma(),
    *_top_k(),
    *_top_p(),
    *_penalties(),
    *_suppressed(),
    *_timestamps(),
]
