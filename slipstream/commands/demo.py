"""``slipstream demo``: the same prompts with and without speculation, and the speed-up."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from slipstream.checkpoints.hub import with_shipped_head
from slipstream.commands.generate import drafts_line, encode_prompt
from slipstream.commands.session import check, open_model
from slipstream.config import EngineOptions
from slipstream.errors import ConfigError, RequestError
from slipstream.output import RequestOutput
from slipstream.sampling_params import SamplingParams
from slipstream.speculate.options import read_speculation

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.text.tokenizer import Tokenizer

PROMPTS = (  # chosen for answers that are long enough to be timed
    "What is the capital of France, and what is it known for?",
    "Give me five tips for a good night's sleep.",
    "Write a short email to a colleague that moves our meeting to Friday.",
)
_ACCEPTED, _PLAIN = "bold green", ""
_WARM_UP = 24  # tokens: one-time costs and the adaptation of the draft length are not measured


class Answer(NamedTuple):
    token_ids: list[int]
    rate: float  # tokens per second after the first


def run(prompt: str | None, engine: EngineOptions, *, max_tokens: int) -> int:
    if prompt is not None and not prompt.strip():
        raise RequestError("the prompt is empty; give a text, or leave it out")
    options = _with_drafts(engine)
    out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)  # answers are printed unformatted
    with open_model(options) as llm:
        for speculate in (False, True):
            llm.generate([encode_prompt(llm.tokenizer, PROMPTS[0], None, False)], _params(_WARM_UP, speculate))
        pairs = []
        for text in PROMPTS if prompt is None else (prompt,):
            out.print(f"> {text}", style="bold")
            pairs.append(_compare(llm, text, max_tokens, out))
        out.print(_table(pairs, llm.config.weight_formats))
        if any(plain.token_ids != drafted.token_ids for plain, drafted in pairs):
            # In 16 bits, orders of summation may break a tie differently; in float32 this was never observed.
            out.print("An answer differs: two tokens were equally likely up to rounding.", style="yellow")
        else:
            out.print("Every answer is the same, token by token.")
    return 0


def _with_drafts(engine: EngineOptions) -> EngineOptions:
    options = with_shipped_head(replace(engine, max_num_seqs=engine.max_num_seqs or 1), by_default=True)
    if options.speculate == "none":
        raise ConfigError("the demo compares speculation with none; leave out --speculate none")
    if options.speculate is None and options.speculative_config is None and options.draft_model is None:
        options = replace(options, speculate="ngram")  # needs nothing but the request's own tokens
    speculative = read_speculation(options)
    if speculative is not None and speculative.verify != "match":
        raise ConfigError(f"the demo shows that texts stay the same, which verify '{speculative.verify}' does not do")
    # A drafter has no keys for a prompt that was cached by the answer without drafts.
    return replace(options, enable_prefix_caching=False)


def _params(max_tokens: int, speculate: bool) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, speculate=speculate)


def _compare(llm: LLM, text: str, max_tokens: int, out: Console) -> tuple[Answer, Answer]:
    """Without drafts first, then with them."""
    token_ids = encode_prompt(llm.tokenizer, text, None, False)
    answers = []
    for speculate in (False, True):
        label = "with drafts" + ", accepted ones in green" * out.is_terminal if speculate else "without drafts"
        out.print(f"[{label}]", style="dim")
        output = paint(llm.stream(token_ids, _params(max_tokens, speculate)), llm.tokenizer, out)
        drafts = output.outputs[0].speculation
        rate = output.timings.tokens_per_s(len(output.token_ids))
        line = f"{rate:,.1f} tokens per second" + ("; " + drafts_line(drafts) if speculate and drafts else "")
        out.print(line + "\n", style="dim")
        answers.append(Answer(output.token_ids, rate))
    return answers[0], answers[1]


def paint(outputs: Iterable[RequestOutput], tokenizer: Tokenizer, out: Console) -> RequestOutput:
    """Write an answer as it arrives, with accepted draft tokens in colour. Returns the last output."""
    from slipstream.text.detokenizer import IncrementalDetokenizer

    detokenizer, last = IncrementalDetokenizer(tokenizer), None
    num_shown = num_accepted = 0
    for output in outputs:  # one a step
        completion, last = output.outputs[0], output
        fresh = completion.token_ids[num_shown:]
        accepted = (completion.speculation.num_accepted if completion.speculation is not None else 0) - num_accepted
        # The tokens of a step are its accepted drafts, followed by the target's own token.
        for part, style in ((fresh[:accepted], _ACCEPTED), (fresh[accepted:], _PLAIN)):
            out.print(detokenizer.add(part), end="", style=style, markup=False, emoji=False)
        num_shown, num_accepted = num_shown + len(fresh), num_accepted + accepted
        sys.stdout.flush()
    out.print(detokenizer.flush(), markup=False, emoji=False)
    if last is None:
        raise RequestError("the engine gave no answer; try again")
    return check(last)


def _table(pairs: list[tuple[Answer, Answer]], weight_formats: str) -> Table:
    table = Table("prompt", title=f"tokens per second, weights {weight_formats}")
    for name in ("without drafts", "with drafts", "speed-up"):
        table.add_column(name, justify="right")
    rows = [(str(number), plain.rate, drafted.rate) for number, (plain, drafted) in enumerate(pairs, 1)]
    if len(pairs) > 1:
        plain_answers, drafted_answers = zip(*pairs, strict=True)
        rows.append(("all", _joint_rate(plain_answers), _joint_rate(drafted_answers)))
    for name, plain_rate, rate in rows:
        ratio = rate / plain_rate if plain_rate else 0.0
        table.add_row(name, f"{plain_rate:,.1f}", f"{rate:,.1f}", f"{ratio:.2f} x")
    return table


def _joint_rate(answers: Iterable[Answer]) -> float:
    """The rate over several answers, the first token of each left out."""
    timed = [(len(answer.token_ids) - 1, answer.rate) for answer in answers if answer.rate]
    seconds = sum(count / rate for count, rate in timed)
    return sum(count for count, _ in timed) / seconds if seconds else 0.0
