"""What is compared of two runs of a request: tokens, text, how it ended, log probabilities of output and prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lossless_fuzz_driver import Seen
from slipstream.output import Completion, Logprobs, RequestOutput
from slipstream.text.detokenizer import Decoder, IncrementalDetokenizer

TOLERANCE = 1e-9  # of log probabilities


@dataclass
class Comparison:
    """``differences``: each a line that says what is not the same."""

    differences: list[str] = field(default_factory=list)
    num_logprobs: int = 0
    # Log probabilities are made in float64 and reported in float32: of one at the border of two float32 numbers another
    # order of sums makes the one or the other. Those are no differences, and are counted.
    num_rounded: int = 0
    exact: bool = False  # the same to the bit, or different

    def check(self, what: str, found: Any, plain: Any) -> None:
        if found != plain:
            self.differences.append(f"{what}: {found!r}, plain {plain!r}")

    def check_logprobs(
        self, what: str, found: Sequence[Logprobs | None], plain: Sequence[Logprobs | None], is_cut: bool
    ) -> None:
        if is_cut:
            plain = plain[: len(found)]
        self.check(f"number of {what}", len(found), len(plain))
        for position, (own, other) in enumerate(zip(found, plain, strict=False)):
            where = f"{what} at {position}"
            if own is None or other is None:
                self.check(where, own, other)
                continue
            ranks = [{token_id: entry.rank for token_id, entry in row.items()} for row in (own, other)]
            self.check(f"{where}, ranks", *ranks)
            for token_id in own.keys() & other.keys():
                self._check_value(f"{where}, token {token_id}", own[token_id].logprob, other[token_id].logprob)

    def _check_value(self, what: str, found: float, plain: float) -> None:
        self.num_logprobs += 1
        if found == plain or (not self.exact and abs(found - plain) <= TOLERANCE):
            return
        if not self.exact and abs(found - plain) <= np.spacing(np.float32(max(abs(found), abs(plain)))):
            self.num_rounded += 1
        else:
            self.differences.append(f"{what}: {found!r}, plain {plain!r}")


def compare(seen: Seen, alone: Seen, decoder: Decoder, exact: bool = False) -> Comparison:
    """A request of a full engine with the same request by itself."""
    result = Comparison(exact=exact)
    if seen.last is None or alone.last is None or not (seen.is_finished and alone.is_finished):
        result.differences.append("it never ended" if alone.is_finished else "it never ended by itself")
        return result
    result.check("outputs after the end", seen.num_after_end, 0)
    result.check("error", _error(seen), _error(alone))
    result.check("prompt", list(seen.last.prompt_token_ids), list(alone.last.prompt_token_ids))
    result.check("number of continuations", len(seen.last.outputs), len(alone.last.outputs))
    is_cut = False
    for found, plain in zip(seen.last.outputs, alone.last.outputs, strict=False):
        was_cut = found.finish_reason == "abort"
        is_cut |= was_cut
        if was_cut and not seen.was_aborted:
            result.differences.append(f"continuation {found.index} was aborted by no caller")
        _compare_completions(result, found, plain, was_cut, _text_of_cut(seen, found, decoder))
        if seen.request.every_token:
            result.check(f"streamed text {found.index}", seen.streamed.get(found.index, ""), found.text)
    prompts = (seen.last.prompt_logprobs, alone.last.prompt_logprobs)
    if None not in prompts or not is_cut:
        result.check("prompt logprobs", prompts[0] is None, prompts[1] is None)
        result.check_logprobs("prompt logprobs", prompts[0] or [], prompts[1] or [], is_cut)
    return result


def _error(seen: Seen) -> str | None:
    output: RequestOutput | None = seen.last
    return None if output is None or seen.was_aborted else output.error


def _text_of_cut(seen: Seen, found: Completion, decoder: Decoder) -> str:
    """Of tokens that an abort has cut off: all their text, for what was held back can be no stop string any more."""
    detokenizer = IncrementalDetokenizer(decoder, seen.request.params.skip_special_tokens)
    return "".join(detokenizer.add([token_id]) for token_id in found.token_ids) + detokenizer.flush()


def _compare_completions(
    result: Comparison, found: Completion, plain: Completion, was_cut: bool, text_of_cut: str
) -> None:
    name = f"continuation {found.index}, "
    if was_cut:
        result.check(f"{name}tokens", found.token_ids, plain.token_ids[: len(found.token_ids)])
        result.check(f"{name}aborted at its end", len(found.token_ids) >= len(plain.token_ids), False)
        result.check(f"{name}text", found.text, text_of_cut)
    else:
        for what in ("token_ids", "finish_reason", "stop_reason", "text"):
            result.check(f"{name}{what}", getattr(found, what), getattr(plain, what))
    result.check(f"{name}logprobs", found.logprobs is None, plain.logprobs is None)
    result.check_logprobs(f"{name}logprobs", found.logprobs or [], plain.logprobs or [], was_cut)
    if found.logprobs is not None:
        result.check(f"{name}logprobs for each token", len(found.logprobs), len(found.token_ids))
