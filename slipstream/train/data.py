"""The texts a head learns from: the target writes both sides of conversations, and answers what is put to it.

Three rounds, each one batch of requests for the engine: turns of users; answers to them and to given prompts; then
what builds on both, such as follow-ups, later turns, and long contexts made of what was written before.
"""

from __future__ import annotations

import hashlib
import queue
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.config import EngineOptions
from slipstream.device import open_device
from slipstream.engine.build import build_engine
from slipstream.engine.client import EngineClient
from slipstream.errors import ConfigError, EngineError
from slipstream.train.prompts import FOLLOW_UPS, LONG_TASKS, Form, form_of, read_prompts
from slipstream.train.settings import TrainSettings, check_same
from slipstream.train.store import read_store, write_store
from slipstream.types import RequestOutput, SamplingParams

_RECIPE = 3  # of what is asked and how; texts of another one are another training's
_TURN_TEMPERATURES = (0.6, 0.8, 1.0)
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.5, 0.8, 1.0)  # one after another
_TURN_LEN = 64
_LEAST_ANSWER, _LONGEST_ANSWER = 16, 320  # small targets repeat themselves in longer ones
_HELD_OUT_EVERY, _MAX_HELD_OUT = 16, 96
_SHARE_LONG, _SHARE_FOLLOW_UP = 0.2, 0.15

Advance = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class Texts:
    """Sequences of token ids, one after another, and what counts in each."""

    token_ids: Tensor  # [total] int32
    starts: Tensor  # [n + 1] int64
    learn_from: Tensor  # [n] int64: the first token whose prediction is learnt
    answer_from: Tensor  # [n] int64: the first token of the answer
    held_out: Tensor  # [n] bool: never learnt from; answered greedily

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    def tokens_of(self, idx: int) -> Tensor:
        return self.token_ids[int(self.starts[idx]) : int(self.starts[idx + 1])]

    def where(self, held_out: bool) -> Tensor:
        return (self.held_out == held_out).nonzero().flatten()


class Asked(NamedTuple):
    """A prompt on its way to the engine."""

    prompt: list[int]
    learn_from: int
    held_out: bool
    turns: tuple[str, ...]


@dataclass
class _Written:
    """What has come back so far."""

    sequences: list[tuple[list[int], int, int, bool]] = field(default_factory=list)
    conversations: list[tuple[tuple[str, ...], bool]] = field(default_factory=list)  # turns, answer last; held out

    def add(self, asked: Asked, output: RequestOutput) -> None:
        answer, start = output.outputs[0], len(asked.prompt)
        if len(answer.token_ids) > 1:
            token_ids = [*asked.prompt, *answer.token_ids]
            self.sequences.append((token_ids, asked.learn_from, start, asked.held_out))
            self.conversations.append(((*asked.turns, answer.text.strip()), asked.held_out))

    def texts(self) -> Texts:
        ids, learn, answer, held = zip(*self.sequences, strict=True)
        starts = torch.tensor([0, *map(len, ids)]).cumsum(0)
        flat = torch.tensor([token for sequence in ids for token in sequence], dtype=torch.int32)
        return Texts(flat, starts, torch.tensor(learn), torch.tensor(answer), torch.tensor(held))


class Source:
    """The texts of some settings: in a file, or still to be written."""

    def __init__(self, settings: TrainSettings, path: Path) -> None:
        self._settings, self._path = settings, path
        self._given = [] if settings.prompts is None else read_prompts(Path(settings.prompts))
        digest = hashlib.sha256(repr(self._given).encode()).hexdigest()
        self._about = settings.of_data() | {"prompts_digest": digest, "recipe": _RECIPE}

    def read(self) -> Texts | None:
        if not self._path.exists():
            return None
        tensors, about = read_store(self._path)
        if about.get("recipe") != _RECIPE:
            raise ConfigError(f"{self._path} was written by another version, which asks otherwise; delete it")
        check_same(about, self._about, self._path)
        return Texts(**tensors)

    def write(self, model_path: Path, say: Callable[[str], None], advance: Advance) -> Texts:
        if len(self._given) > self._settings.sequences:
            say(f"of {len(self._given):,} prompts the first {self._settings.sequences:,} are used (--sequences)")
        texts = _generate(self._settings, model_path, self._given, say, advance)
        write_store(self._path, dict(vars(texts)), self._about)
        return texts


def _generate(
    settings: TrainSettings, model_path: Path, given: list[list[str]], say: Callable[[str], None], advance: Advance
) -> Texts:
    on_gpu = open_device(settings.device).name == "cuda"
    options = EngineOptions(
        model=str(model_path),
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_len,
        max_num_seqs=512 if on_gpu else 32,
        seed=settings.seed,
    )
    client = EngineClient.in_thread(lambda: build_engine(options))
    try:
        form, line = form_of(client.tokenizer)
        if line is not None:
            say(line)
        return _Author(client, form, settings, advance).write(given)
    finally:
        client.close()


class _Author:
    def __init__(self, client: EngineClient, form: Form, settings: TrainSettings, advance: Advance) -> None:
        self._client, self._form, self._settings, self._advance = client, form, settings, advance
        self._random = random.Random(settings.seed)
        self._num_asked = 0

    def write(self, given: list[list[str]]) -> Texts:
        total = self._settings.sequences
        given = given[:total]
        num_later = min(sum(len(turns) - 1 for turns in given), total - len(given))
        own = total - len(given) - num_later
        num_long, num_follow = round(own * _SHARE_LONG), round(own * _SHARE_FOLLOW_UP)
        written = _Written()
        first = [*self._given(given), *self._own(own - num_long - num_follow)]
        if not first:
            raise ConfigError(f"every prompt is longer than --max-len {self._settings.max_len} allows; raise it")
        for asked, output in self._ask("answers", first):
            written.add(asked, output)
        built = [*self._follow_ups(written, num_follow), *self._long(written, num_long)]
        for asked, output in self._ask("long texts and follow-ups", built):
            written.add(asked, output)
        self._later_turns(written, given)
        texts = written.texts() if written.sequences else None
        if texts is None or not len(texts.where(True)) or not len(texts.where(False)):
            raise ConfigError("the target wrote almost nothing; raise --sequences, or give --prompts")
        return texts

    def _given(self, given: list[list[str]]) -> Iterator[Asked]:
        for turns, held_out in zip(given, _held_out([turns[0] for turns in given]), strict=True):
            yield from self._asked(turns[:1], held_out)

    def _own(self, count: int) -> Iterator[Asked]:
        """Turns of users, written by the target."""
        openings = [self._form.opening(self._random) for _ in range(count)]
        params = [
            replace(
                self._params(_TURN_TEMPERATURES[i % len(_TURN_TEMPERATURES)], _TURN_LEN),
                stop=self._form.stop,
                stop_token_ids=self._form.stop_ids,
            )
            for i in range(count)
        ]
        outputs = self._run("turns of users", [opening.token_ids for opening in openings], params)
        turns = [
            (opening.words + output.outputs[0].text).strip() or "Hello!"
            for opening, output in zip(openings, outputs, strict=True)
        ]
        for turn, held_out in zip(turns, _held_out(turns), strict=True):
            yield from self._asked((turn,), held_out, self._form.begin)

    def _follow_ups(self, written: _Written, count: int) -> Iterator[Asked]:
        for turns, held_out in _draw(self._random, written.conversations, count):
            if all(turns):
                yield from self._asked((*turns, self._random.choice(FOLLOW_UPS)), held_out)

    def _long(self, written: _Written, count: int) -> Iterator[Asked]:
        """Contexts of all lengths up to two thirds of the longest, made of texts that were written before."""
        tokens_of = self._client.tokenizer.encode
        pools = {flag: [turns[-2:] for turns, held in written.conversations if held == flag] for flag in (True, False)}
        for idx in range(count):
            room = self._random.randint(_LEAST_ANSWER, max(_LEAST_ANSWER, self._settings.max_len * 2 // 3))
            pool = pools[_is_held_out(idx)]
            parts: list[tuple[str, ...]] = []
            while pool and room > 0 and len(parts) < 64:
                parts.append(self._random.choice(pool))
                room -= len(tokens_of(parts[-1][-1], add_special_tokens=False)) + 1
            if parts:
                text, question = "\n\n".join(answer for _, answer in parts), self._random.choice(parts)[0]
                turn = self._random.choice(LONG_TASKS).format(text=text, question=question)
                yield from self._asked((turn,), _is_held_out(idx))

    def _later_turns(self, written: _Written, given: list[list[str]]) -> None:
        """Given conversations of several turns: each answer is there before the next turn is asked."""
        first = [turns[0] for turns in given]
        held = dict(zip(first, _held_out(first), strict=True))
        known = {turns[0]: turns for turns, _ in written.conversations if turns[0] in held}
        for place in range(1, max(map(len, given), default=0)):
            asked: list[Asked] = []
            for turns in given:
                if len(turns) > place and len(before := known.get(turns[0], ())) == 2 * place:
                    asked += self._asked((*before, turns[place]), held[turns[0]])
            for one, output in self._ask("later turns", asked):
                written.add(one, output)
                known[one.turns[0]] = (*one.turns, output.outputs[0].text.strip())

    def _asked(self, turns: Sequence[str], held_out: bool, learn_from: int | None = None) -> Iterator[Asked]:
        """Nothing, where no room would be left for an answer."""
        prompt = self._form.prompt(turns)
        if 0 < len(prompt) <= self._settings.max_len - _LEAST_ANSWER:
            yield Asked(prompt, len(prompt) if learn_from is None else learn_from, held_out, tuple(turns))

    def _ask(self, what: str, asked: list[Asked]) -> Iterator[tuple[Asked, RequestOutput]]:
        longest = min(_LONGEST_ANSWER, max(_LEAST_ANSWER, self._settings.max_len // 2))
        temperatures = _ANSWER_TEMPERATURES
        params = [
            self._params(0.0 if one.held_out else temperatures[i % len(temperatures)], longest)
            for i, one in enumerate(asked)
        ]
        yield from zip(asked, self._run(what, [one.prompt for one in asked], params), strict=True)

    def _params(self, temperature: float, max_tokens: int) -> SamplingParams:
        self._num_asked += 1
        seed = (self._settings.seed << 32) + self._num_asked
        # Whatever the model's authors recommend: the pure distribution, which steps draw from inside their graphs.
        pure = SamplingParams(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
        return replace(pure, temperature=temperature, max_tokens=max_tokens, seed=seed)

    def _run(self, what: str, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        """All requests at once; the engine batches them."""
        done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        submissions = [self._client.prepare(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        for submission in submissions:
            self._client.submit(submission, done.put, every_token=False)
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < len(submissions):
            output = done.get()
            if output.error is not None:
                raise EngineError(f"the target could not write its texts: {output.error}")
            outputs[output.request_id] = output
            self._advance(what, len(outputs), len(submissions))
        return [outputs[submission.request_id] for submission in submissions]


def _held_out(turns: Sequence[str]) -> list[bool]:
    """Which of them are; none that is asked twice, for its other answer is learnt."""
    counts = Counter(turns)
    return [_is_held_out(idx) and counts[turn] == 1 for idx, turn in enumerate(turns)]


def _is_held_out(idx: int) -> bool:
    return idx % _HELD_OUT_EVERY == _HELD_OUT_EVERY // 2 and idx < _HELD_OUT_EVERY * _MAX_HELD_OUT


def _draw(
    generator: random.Random, items: Sequence[tuple[tuple[str, ...], bool]], count: int
) -> list[tuple[tuple[str, ...], bool]]:
    return generator.sample(items, min(count, len(items)))
