"""Drafts of every kind for the kernel of rejection sampling; run interpreted and on a GPU.

Float32 on a device and float64 here may see a close race differently, so no race is close: positions, and with them the
noise, are drawn again until every winner leads clearly in ``judged``, which writes the method down once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.sampling.gumbel import TARGET_NOISE, gumbel_noise
from slipstream.speculate.rejection import ACCEPT_NOISE, RESIDUAL_NOISE, judge_drafts
from tests.kernels.triton_check import POISON, Case, Real
from tests.sampling.triton_cases import grid_logits, some_ids

MARGIN = 2e-3


class Verdict(NamedTuple):
    accepted: bool
    token_id: int
    margin: float  # how far the nearest other outcome is


def judged(args: dict[str, Any], i: int) -> Verdict:
    """One row in plain probabilities, in float64. Greedy ties count as clear: every float type sees them."""
    logits, draft = args["logits"].tensor[i].double(), int(args["draft_ids"][i])
    row = int(args["logit_rows"][i])
    temperature = float(args["temperature"][row])
    key = (args["seeds"][row : row + 1], args["positions"][i : i + 1], args["choice"][row : row + 1])

    def race(scores: Tensor, purpose: int) -> tuple[int, float]:
        scores = scores + gumbel_noise(*key, len(scores), purpose)[0].double()
        first, *others = scores.topk(min(2, len(scores))).values.tolist()
        return int(scores.argmax()), first - max(others, default=-torch.inf)

    if not torch.isfinite(logits).any():
        return Verdict(False, 0, torch.inf)
    if temperature == 0:
        token_id = int(logits.argmax())
        return Verdict(draft == token_id, token_id, torch.inf)
    if draft < 0:
        return Verdict(False, *race(logits, TARGET_NOISE))
    target_probs, draft_probs = logits.softmax(0), torch.zeros(len(logits)).double()
    if args["draft_logits"] is None:
        draft_probs[draft] = 1.0
    else:
        given = args["draft_logits"][row, int(args["draft_idx"][i])].double()
        columns = args.get("draft_columns")
        known = torch.arange(len(logits)) < len(given) if columns is None else columns >= 0
        draft_probs[known] = (given / temperature).softmax(0)  # columns are in the order of their tokens
    # The only token's Gumbel noise is a number for number image of the first uniform one.
    uniform = -torch.expm1(-torch.exp(-gumbel_noise(*key, 1, ACCEPT_NOISE)[0, 0].double()))
    ratio = float(target_probs[draft] / draft_probs[draft] / uniform)
    residual = (target_probs - draft_probs).clamp(min=0)
    scores = residual.log() if residual.any() else logits
    token_id, margin = race(scores, RESIDUAL_NOISE)
    return Verdict(ratio > 1, token_id, min(margin, abs(ratio - 1)))


def _clear(args: dict[str, Any]) -> dict[str, Any]:
    for i in range(len(args["positions"])):
        while judged(args, i).margin < MARGIN:
            args["positions"][i] = torch.randint(0, 2**31, ())
    return args


def judge_args(
    n: int,
    vocab_size: int,
    draft_vocab_size: int = 0,  # 0: the drafter is deterministic
    k: int = 3,
) -> dict[str, Any]:
    num_rows = n + 3
    temperature = torch.rand(num_rows) + 0.3
    temperature[torch.rand(num_rows) < 0.3] = 0.0
    logits = grid_logits(n, vocab_size)
    if n > 4:
        logits[4] = -torch.inf
    logit_rows = torch.randint(0, num_rows, (n,), dtype=torch.int32)
    draft_idx = torch.randint(0, k, (n,), dtype=torch.int32)
    # What the target likes, what the drafter likes, anything, and none.
    draft_ids = torch.randint(0, draft_vocab_size or vocab_size, (n,), dtype=torch.int32)
    draft_ids[::2] = logits[:, : draft_vocab_size or vocab_size].argmax(1)[::2].int()
    draft_logits = None
    if draft_vocab_size:
        draft_logits = 2 * torch.randn(num_rows, k, draft_vocab_size)
        draft_ids[1::3] = draft_logits[logit_rows.long(), draft_idx.long()].argmax(1)[1::3].int()
    draft_ids[torch.rand(n) < 0.2] = -1
    draft_idx[draft_ids < 0] = POISON << 16
    return {
        "logits": Real(logits),
        "draft_ids": draft_ids,
        "logit_rows": logit_rows,
        "draft_idx": draft_idx,
        "draft_logits": draft_logits,
        "temperature": temperature,
        "seeds": torch.randint(-(2**31), 2**31, (num_rows, 2)).int(),
        "positions": torch.randint(0, 2**31, (n,), dtype=torch.int32),
        "choice": torch.randint(0, 9, (num_rows,), dtype=torch.int32),
    }


def reduced(args: dict[str, Any]) -> dict[str, Any]:
    """The same drafter for tokens spread over the target's vocabulary; some drafts are others, which it cannot draw."""
    vocab_size, count = args["logits"].tensor.shape[1], args["draft_logits"].shape[2]
    target_ids = some_ids(count, vocab_size)
    columns = torch.full((vocab_size,), -1, dtype=torch.int32)
    columns[target_ids.long()] = torch.arange(count, dtype=torch.int32)
    drafts = args["draft_ids"]
    known = target_ids[drafts.long().clamp(min=0)]
    known[3::4] = torch.randint(0, vocab_size, (len(drafts),)).int()[3::4]
    return {**args, "draft_ids": torch.where(drafts < 0, drafts, known), "draft_columns": columns}


def same_args(n: int, vocab_size: int) -> dict[str, Any]:
    """The drafter is the target: what is halved comes back whole at a temperature of a half."""
    args = judge_args(n, vocab_size, vocab_size, k=1)
    logits = grid_logits(n, vocab_size)
    args["logits"] = Real(logits)
    args["temperature"][:] = 0.5
    args["logit_rows"] = torch.arange(n, dtype=torch.int32)
    args["draft_idx"].zero_()
    args["draft_logits"][:n, 0] = logits / 2
    args["draft_ids"] = logits.argmax(1).int()
    return args


def _certain() -> dict[str, Any]:
    """One token allowed, and it is the draft: nothing is left for the residual."""
    args = judge_args(3, 100)
    args["logits"].tensor[:] = -torch.inf
    args["logits"].tensor[:, 70] = 3.0
    args["draft_ids"].fill_(70)
    args["temperature"].fill_(0.7)
    return args


def _columns(draft_vocab_size: int = 300) -> dict[str, Any]:
    """Tokens that are not next to each other in memory, of both."""
    args = judge_args(6, 300, draft_vocab_size)
    args["logits"] = Real(args["logits"].tensor.T.contiguous().T)
    args["draft_logits"] = args["draft_logits"].mT.contiguous().mT
    return args


def _reduced_cases() -> Iterator[Case]:
    shapes = [(0, 7, 3), (1, 1, 1), (5, 9, 1), (1, 9, 7), (8, 9, 7), (8, 512, 1), (8, 512, 300), (6, 5000, 4097)]
    for shape in [*shapes, (6, 5000, 5000)]:

        def args(shape: tuple[int, int, int] = shape) -> dict[str, Any]:
            return _clear(reduced(judge_args(*shape)))

        yield Case("judge_drafts-{}x{}-reduced{}".format(*shape), judge_drafts, args)
    yield Case("judge_drafts-reduced-columns", judge_drafts, lambda: _clear(reduced(_columns(200))))


def _cases() -> Iterator[Case]:
    shapes = [(0, 7, 0), (0, 7, 7), (1, 1, 0), (1, 1, 1), (5, 1, 1), (1, 7, 0), (6, 7, 0), (6, 7, 7), (6, 7, 3)]
    shapes += [(1, 512, 512), (8, 512, 0), (8, 512, 300), (5, 5000, 0), (6, 5000, 5000), (6, 5000, 4097)]
    for shape in shapes:

        def args(shape: tuple[int, int, int] = shape) -> dict[str, Any]:
            return _clear(judge_args(*shape))

        yield Case("judge_drafts-{}x{}-drafter{}".format(*shape), judge_drafts, args)
    for vocab_size in (1, 5000):

        def same(vocab_size: int = vocab_size) -> dict[str, Any]:
            return _clear(same_args(3, vocab_size))

        yield Case(f"judge_drafts-same-{vocab_size}", judge_drafts, same)
    yield Case("judge_drafts-certain", judge_drafts, lambda: _clear(_certain()))
    yield Case("judge_drafts-columns", judge_drafts, lambda: _clear(_columns()))


CASES = [*_cases(), *_reduced_cases()]
