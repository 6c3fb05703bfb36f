"""``slipstream chat``: a conversation at the terminal, or from a pipe, one line a turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.commands.session import open_model, show_stream
from slipstream.config import EngineOptions
from slipstream.errors import RequestError, nearest
from slipstream.output import RequestOutput
from slipstream.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.llm import LLM

_COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation and start a new one",
    "/exit": "leave (as does Ctrl-D); Ctrl-C stops an answer",
}


def run(sampling: SamplingParams, engine: EngineOptions, *, system: str | None) -> int:
    if sampling.n > 1 or sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        raise RequestError("chat shows one answer as text; --n, --logprobs and --prompt-logprobs belong to generate")
    with open_model(engine) as llm:
        if not llm.tokenizer.has_chat_template:
            raise RequestError(f"{engine.model} has no chat template; use `slipstream generate` to continue a text")
        return Conversation(llm, sampling, system).run()


class Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None) -> None:
        self._llm, self._sampling = llm, sampling
        self._limit = min(llm.config.scheduler.max_model_len, llm.config.cache.num_usable_tokens)
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._interactive = sys.stdin.isatty()
        self._failed = False

    def run(self) -> int:
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() a history and editing keys
            _say("/help lists the commands, Ctrl-D leaves.")
        while (line := self._read_line()) is not None:
            if line in ("/exit", "/quit"):
                break
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)
        # At a terminal the user has seen what failed; a script has only the exit code.
        return 2 if self._failed and not self._interactive else 0

    def _read_line(self) -> str | None:
        """The next line without surrounding space; None at the end of the input."""
        if not self._interactive:
            line = sys.stdin.readline()
            return line.strip() if line else None
        while True:
            try:
                return input("> ").strip()
            except EOFError:
                sys.stdout.write("\n")
                return None
            except KeyboardInterrupt:
                _say("\n/exit or Ctrl-D leaves.")

    def _obey(self, line: str) -> None:
        if line == "/reset":
            self._messages = list(self._opening)
            _say("A new conversation.")
        elif line == "/help":
            for name, meaning in _COMMANDS.items():
                _say(f"{name:8}{meaning}")
        else:
            self._report(f"unknown command '{line}'{nearest(line, _COMMANDS) or '; /help lists them'}")

    def _answer(self, line: str) -> None:
        turn = {"role": "user", "content": line}
        try:
            text = self._generate([*self._messages, turn])
        except RequestError as error:
            self._report(str(error))
            return
        if text:
            self._messages += [turn, {"role": "assistant", "content": text}]

    def _generate(self, messages: list[dict[str, str]]) -> str:
        """Show the answer and return it, or the part of it that was generated before Ctrl-C."""
        token_ids = self._llm.tokenizer.encode_chat(messages)
        room = self._limit - len(token_ids)
        if room < 1:
            raise RequestError(
                f"the conversation has {len(token_ids)} tokens and no longer fits into the context of {self._limit}; "
                "/reset starts a new one"
            )
        stream = self._llm.stream(token_ids, self._fitting(room))
        texts = [""]
        try:
            with contextlib.closing(stream):  # leaving early aborts the request
                output = show_stream(_remembered(stream, texts))
        except KeyboardInterrupt:
            _say("Stopped.")
            return texts[-1]
        if output.finish_reason == "length":
            full = len(output.token_ids) >= room
            _say("The context is full; /reset starts a new conversation." if full else "Cut off by --max-tokens.")
        return output.text

    def _fitting(self, room: int) -> SamplingParams:
        return replace(self._sampling, max_tokens=min(self._sampling.max_tokens or room, room))

    def _report(self, message: str) -> None:
        self._failed = True
        _say(f"error: {message}")


def _remembered(stream: Iterable[RequestOutput], texts: list[str]) -> Iterator[RequestOutput]:
    """Pass outputs through and keep the latest text, so that an interrupt cannot lose it."""
    for output in stream:
        texts.append(output.text)
        yield output


def _say(line: str) -> None:
    """A message about the conversation, on standard error: standard output holds only the answers."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
