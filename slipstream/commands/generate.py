"""``slipstream generate``: one prompt, one answer, and its speed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from slipstream.commands.session import check, open_model, show_stream
from slipstream.config import EngineOptions
from slipstream.errors import RequestError
from slipstream.output import Completion, DraftStats, Logprobs, RequestOutput
from slipstream.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.text.tokenizer import Tokenizer


def run(
    prompt: str, sampling: SamplingParams, engine: EngineOptions, *, system: str | None, raw: bool, as_json: bool
) -> int:
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not (text if raw else text.strip()):
        raise RequestError("the prompt is empty; give a text, or - to read it from standard input")
    if raw and system is not None:
        raise RequestError("--system needs the chat template that --raw switches off; use one of them")
    with open_model(engine) as llm:
        token_ids = encode_prompt(llm.tokenizer, text, system, raw)
        if as_json:
            output = check(llm.generate([token_ids], sampling)[0])
            sys.stdout.write(json.dumps(_as_dict(output, engine.model), ensure_ascii=False) + "\n")
        elif sampling.n > 1:  # several choices cannot be streamed to a terminal, so they are printed at the end
            output = check(llm.generate([token_ids], sampling)[0])
            for completion in output.outputs:
                sys.stdout.write(f"[{completion.index + 1}] {completion.text}\n")
            _show_figures(output)
        else:
            output = show_stream(llm.stream(token_ids, sampling))
            _show_figures(output)
    return 0


def encode_prompt(tokenizer: Tokenizer, text: str, system: str | None, raw: bool) -> list[int]:
    """Token ids of a prompt, through the chat template unless there is none or ``raw`` is set."""
    if raw or not tokenizer.has_chat_template:
        if system is not None:
            raise RequestError("this model has no chat template to put --system in; make it part of the prompt")
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode_chat(messages)


def _as_dict(output: RequestOutput, model: str) -> dict[str, Any]:
    completion, timings = output.outputs[0], output.timings
    extras: dict[str, Any] = {}
    if completion.logprobs is not None:
        extras["logprobs"] = [_logprobs(entry) for entry in completion.logprobs]
    if output.prompt_logprobs is not None:
        extras["prompt_logprobs"] = [entry and _logprobs(entry) for entry in output.prompt_logprobs]
    if len(output.outputs) > 1:
        names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
        extras["choices"] = [
            {name: getattr(choice, name) for name in names} | _speculation(choice) for choice in output.outputs
        ]
    return {
        "model": model,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": output.seed,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "timings": {
            "first_token_s": timings.first_token_s,
            "total_s": timings.total_s,
            "tok_s": timings.tokens_per_s(len(completion.token_ids)),
        },
        **_speculation(completion),
        **extras,
    }


def _speculation(completion: Completion) -> dict[str, Any]:
    """Empty where the engine does not draft."""
    return {} if completion.speculation is None else {"speculation": completion.speculation.as_dict()}


def _logprobs(entry: Logprobs) -> list[dict[str, Any]]:
    """The token of the text first, then the most likely ones."""
    return [{"token_id": token_id, **asdict(logprob)} for token_id, logprob in entry.items()]


def _show_figures(output: RequestOutput) -> None:
    console = Console(stderr=True)
    console.print(_figures(output))
    for completion in output.outputs:
        if completion.speculation is not None:
            which = f"[{completion.index + 1}] " if len(output.outputs) > 1 else ""
            line = which + drafts_line(completion.speculation)
            console.print(line, soft_wrap=True, highlight=False, markup=False)


def drafts_line(drafts: DraftStats) -> str:
    line = f"{drafts.num_accepted} of {drafts.num_drafts} drafts accepted, mean length {drafts.mean_length:.2f}"
    if drafts.num_drafts:
        line += ", by position " + " ".join(f"{rate:.0%}" for rate in drafts.acceptance_at)
    return line + (" (SYNTHETIC)" if drafts.is_synthetic else "")


def _figures(output: RequestOutput) -> Table:
    table = Table("prompt tokens", "output tokens", "time to first token", "tokens per second")
    for column in table.columns:
        column.justify = "right"
    first_ms = 1000 * (output.timings.first_token_s or 0.0)
    rate = output.timings.tokens_per_s(len(output.token_ids))
    table.add_row(str(len(output.prompt_token_ids)), str(len(output.token_ids)), f"{first_ms:,.0f} ms", f"{rate:,.1f}")
    return table
