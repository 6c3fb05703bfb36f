"""Training texts that the target itself generates: users' turns, documents, answers, and tasks about what it wrote.

Three rounds, each one batch of requests for the engine: users' turns and documents; answers to these turns and to given
prompts; then what builds on both, such as follow-ups, later turns, and tasks with long contexts. Held-out texts and
training texts stay apart: a text that contains others is held out if and only if they are.
"""

from __future__ import annotations

import queue
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from slipstream.engine.client import EngineClient
from slipstream.errors import ConfigError, EngineError
from slipstream.output import RequestOutput
from slipstream.sampling_params import SamplingParams
from slipstream.train.fillers import Fillers, filler_words
from slipstream.train.prompt_templates import (
    DOCUMENTS,
    FOLLOW_UPS,
    FOREIGN_DOCUMENTS,
    LONG_TASKS,
    QUESTIONS,
    TRANSLATIONS,
)
from slipstream.train.prompts import Opening, PromptFormat
from slipstream.train.repetition_filter import Ids, length_without_repetition
from slipstream.train.settings import CommonSettings

_TURN_TEMPERATURES = (0.5, 0.7, 0.9)  # used in turn, as are the others
_DOCUMENT_TEMPERATURES, _FOREIGN_TEMPERATURE = (0.7, 0.8, 0.9), 0.7  # at higher ones small targets slip into English
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)
_TURN_LEN, _DOCUMENT_LEN = 64, 300
_LEAST_ANSWER, _LONGEST_ANSWER = 16, 320  # small targets repeat themselves in longer ones
_SHARE_LONG, _SHARE_FOLLOW_UP = 0.25, 0.15
_SHARE_DOCUMENTS, _SHARE_FOREIGN = 0.5, 0.3  # of long tasks; of documents
_LEAST_CONTEXT, _MOST_PARTS = 64, 64
_SENTENCE_END, _WORD = re.compile(r"(?<=[.!?])\s+"), re.compile(r"[^\W\d_]{4,}")
_HELD_OUT_EVERY = 16
_MOST_HELD_OUT, _MOST_LONG_HELD_OUT = 400, 96  # long ones take more time to measure
# The unmodified distribution whatever the generation config says: steps sample it inside their graphs.
_PURE = SamplingParams(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)

_EngineRequest = tuple[list[int], SamplingParams]
OnCount = Callable[[str, int, int], None]  # what is counted, how many are done, of how many


class GeneratedText(NamedTuple):
    """A complete training text."""

    token_ids: Ids
    learn_from: int  # the first token whose prediction is trained
    answer_from: int
    held_out: bool


class _Prompt(NamedTuple):
    """A conversation that the target is to answer."""

    token_ids: list[int]
    turns: tuple[str, ...]
    held_out: bool


class _Passage(NamedTuple):
    """A document or an answer, of which longer texts can be composed."""

    text: str
    token_ids: Ids
    turns: tuple[str, ...]  # the conversation it answers; none for a document
    held_out: bool
    foreign: bool = False


class TextGenerator:
    def __init__(
        self, client: EngineClient, prompt_format: PromptFormat, settings: CommonSettings, on_count: OnCount
    ) -> None:
        self._client, self._format, self._settings, self._on_count = client, prompt_format, settings, on_count
        self._random = random.Random(settings.seed)
        self._fillers = Fillers(filler_words(client.tokenizer))
        self._num_requests = 0
        self._written: list[GeneratedText] = []

    def write(self, given: list[list[str]]) -> list[GeneratedText]:
        """Texts from given prompts, the first turn of each in order, and from the target's own."""
        total = self._settings.sequences
        given = given[:total]
        num_later = min(sum(len(turns) - 1 for turns in given), total - len(given))
        own = total - len(given) - num_later
        num_long, num_follow = round(own * _SHARE_LONG), round(own * _SHARE_FOLLOW_UP)
        turns, documents = self._material(own - num_long - num_follow, round(num_long * _SHARE_DOCUMENTS))
        before = self._num_requests
        answers = self._answer("answers", self._first([one[0] for one in given], turns))
        if self._num_requests == before:
            raise ConfigError(f"every prompt is longer than --max-len {self._settings.max_len} allows; raise it")
        built = chain(self._follow_ups(answers, num_follow), self._long(answers, documents, num_long))
        self._answer("long texts and follow-ups", built)
        self._later_turns(answers, given)
        return self._written

    def _material(self, num_turns: int, num_documents: int) -> tuple[list[str], list[_Passage]]:
        """Users' turns and documents."""
        openings: list[Opening] = []
        begun: list[Opening] = []
        foreign = [self._random.random() < _SHARE_FOREIGN for _ in range(num_documents)]
        requests = chain(self._turn_requests(openings, num_turns), self._document_requests(begun, foreign))
        outputs = self._run("users' turns and documents", requests)
        turns = [
            (opening.text + self._without_repetition(output)[0]).strip() or "Hello!"
            for opening, output in zip(openings, outputs[:num_turns], strict=True)
        ]
        documents: list[_Passage] = []
        for opening, output, flag in zip(begun, outputs[num_turns:], foreign, strict=True):
            text, token_ids = self._without_repetition(output)
            token_ids = np.append(_ids(opening.token_ids), token_ids)
            documents.append(_Passage(whole_sentences(opening.text + text), token_ids, (), False, flag))
        held = _held_out([document.text for document in documents], _MOST_LONG_HELD_OUT)
        return turns, [one._replace(held_out=flag) for one, flag in zip(documents, held, strict=True)]

    def _turn_requests(self, openings: list[Opening], count: int) -> Iterator[_EngineRequest]:
        for i in range(count):
            openings.append(self._fitting(self._format.opening(self._random, self._fillers), self._format.begin))
            params = self._params(_TURN_TEMPERATURES[i % len(_TURN_TEMPERATURES)], _TURN_LEN)
            yield openings[-1].token_ids, replace(params, stop=self._format.stop, stop_token_ids=self._format.stop_ids)

    def _document_requests(self, begun: list[Opening], foreign: list[bool]) -> Iterator[_EngineRequest]:
        longest = min(_DOCUMENT_LEN, self._longest_answer())
        for i, flag in enumerate(foreign):
            text = self._fillers.fill(self._random, FOREIGN_DOCUMENTS if flag else DOCUMENTS)
            begun.append(self._fitting(Opening(self._client.tokenizer.encode(text), text), 0))
            temperature = _FOREIGN_TEMPERATURE if flag else _DOCUMENT_TEMPERATURES[i % len(_DOCUMENT_TEMPERATURES)]
            yield begun[-1].token_ids, self._params(temperature, longest)

    def _fitting(self, opening: Opening, begin: int) -> Opening:
        """Cut to leave room for an answer, which matters where --max-len is small and every letter is a token."""
        token_ids = opening.token_ids[: self._settings.max_len - _LEAST_ANSWER]
        if len(token_ids) == len(opening.token_ids):
            return opening
        return Opening(token_ids, self._client.tokenizer.decode(token_ids[begin:]))

    def _first(self, given: list[str], own: list[str]) -> Iterator[_Prompt]:
        """First turns of conversations. One that occurs twice is not held out, since its other answer is trained on."""
        counts = Counter([*given, *own])
        for turns in (given, own):
            for turn, held_out in zip(turns, _held_out(turns, _MOST_HELD_OUT), strict=True):
                yield from self._prompt((turn,), held_out and counts[turn] == 1)

    def _follow_ups(self, answers: list[_Passage], count: int) -> Iterator[_Prompt]:
        for one in self._random.sample(answers, min(count, len(answers))):
            if one.text:
                follow_up = self._fillers.fill(self._random, FOLLOW_UPS)
                yield from self._prompt((*one.turns, one.text, follow_up), one.held_out)

    def _long(self, answers: list[_Passage], documents: list[_Passage], count: int) -> Iterator[_Prompt]:
        """Tasks about texts that were generated before."""
        pools = {
            flag: (
                [one for one in answers if one.text and one.held_out == flag],
                [one for one in documents if one.text and one.held_out == flag and not one.foreign],
                [one for one in documents if one.text and one.held_out == flag and one.foreign],
            )
            for flag in (True, False)
        }
        of_documents = (1 - _SHARE_FOREIGN) * _SHARE_DOCUMENTS
        weights = (1 - _SHARE_DOCUMENTS, of_documents, _SHARE_FOREIGN * _SHARE_DOCUMENTS)
        for idx in range(count):
            held_out = _is_held_out(idx, _MOST_LONG_HELD_OUT)
            [pool] = self._random.choices(pools[held_out], weights)
            pool = pool or next(filter(None, pools[held_out]), [])
            if pool:
                yield from self._prompt((self._task(pool),), held_out)

    def _task(self, pool: list[_Passage]) -> str:
        """A task with a context of any length up to two thirds of --max-len."""
        most = max(_LEAST_ANSWER, self._settings.max_len * 2 // 3)
        room = self._random.randint(min(_LEAST_CONTEXT, most), most)
        first = self._random.choice(pool)
        if first.foreign:
            some = self._random.choice((1, 1, 2, 3, None))  # sentences
            text = " ".join(_SENTENCE_END.split(self._shortened(first, room))[:some])
            return self._random.choice(TRANSLATIONS).format(text=text)
        parts, texts = [first], [self._shortened(first, room)]
        room -= len(first.token_ids)
        while (one := self._random.choice(pool)) and len(one.token_ids) < room and len(parts) < _MOST_PARTS:
            parts.append(one)
            texts.append(one.text)
            room -= len(one.token_ids)
        text = "\n\n".join(texts)
        turns = self._random.choice(parts).turns
        question = turns[-1] if turns else self._question(text)
        return self._random.choice(LONG_TASKS).format(text=text, question=question)

    def _shortened(self, passage: _Passage, room: int) -> str:
        if len(passage.token_ids) <= room:
            return passage.text
        return whole_sentences(self._client.tokenizer.decode(passage.token_ids[:room].tolist()).strip())

    def _question(self, text: str) -> str:
        """A question about a word of the text."""
        own = self._random.choice(_WORD.findall(text) or ["it"])
        return self._random.choice(QUESTIONS).format(own=own)

    def _later_turns(self, answers: list[_Passage], given: list[list[str]]) -> None:
        """Given conversations of several turns: each turn follows the target's answer to the one before."""
        known = {one.turns[0]: one for one in answers}
        for turn_idx in range(1, max(map(len, given), default=0)):
            prompts: list[_Prompt] = []
            for turns in given:
                before = known.get(turns[0])
                if len(turns) > turn_idx and before is not None and len(before.turns) == 2 * turn_idx - 1:
                    prompts += self._prompt((*before.turns, before.text, turns[turn_idx]), before.held_out)
            known |= {one.turns[0]: one for one in self._answer("later turns", prompts)}

    def _prompt(self, turns: Sequence[str], held_out: bool) -> Iterator[_Prompt]:
        """The prompt of a conversation; nothing where no room would be left for an answer."""
        prompt = self._format.prompt(turns)
        if 0 < len(prompt) <= self._settings.max_len - _LEAST_ANSWER:
            yield _Prompt(prompt, tuple(turns), held_out)

    def _longest_answer(self) -> int:
        return min(_LONGEST_ANSWER, max(_LEAST_ANSWER, self._settings.max_len // 2))

    def _answer(self, what: str, prompts: Iterable[_Prompt]) -> list[_Passage]:
        """Generate answers, and keep prompt and answer as a training text."""
        sent: list[_Prompt] = []

        def requests() -> Iterator[_EngineRequest]:
            for i, one in enumerate(prompts):
                sent.append(one)
                temperature = 0.0 if one.held_out else _ANSWER_TEMPERATURES[i % len(_ANSWER_TEMPERATURES)]
                yield one.token_ids, self._params(temperature, self._longest_answer())

        passages: list[_Passage] = []
        for output, one in zip(self._run(what, requests()), sent, strict=True):
            if len(output.outputs[0].token_ids) > 1:
                text, answer, start = *self._without_repetition(output), len(one.token_ids)
                token_ids = np.append(_ids(one.token_ids), answer)
                # Everything after the template's beginning is trained on: the target predicts any text.
                self._written.append(GeneratedText(token_ids, min(self._format.begin, start), start, one.held_out))
                passages.append(_Passage(text.strip(), answer, one.turns, one.held_out))
        return passages

    def _without_repetition(self, output: RequestOutput) -> tuple[str, Ids]:
        answer = output.outputs[0]
        token_ids = _ids(answer.token_ids)
        kept = token_ids[: length_without_repetition(token_ids)]
        if len(kept) == len(token_ids):
            return answer.text, kept
        text = self._client.tokenizer.decode(kept.tolist())
        # Some tokenizers drop a space at the beginning of a text, but this text continues another one.
        space = answer.text[:1] if answer.text[:1].isspace() and not text[:1].isspace() else ""
        return space + text, kept

    def _params(self, temperature: float, max_tokens: int) -> SamplingParams:
        self._num_requests += 1
        seed = (self._settings.seed << 32) + self._num_requests
        return replace(_PURE, temperature=temperature, max_tokens=max_tokens, seed=seed)

    def _run(self, what: str, requests: Iterable[_EngineRequest]) -> list[RequestOutput]:
        """Submit all requests at once; the engine batches them, and starts while later ones are still built."""
        done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        request_ids: list[str] = []
        for prompt, params in requests:
            submission = self._client.prepare(prompt, params)
            self._client.submit(submission, done.put, every_token=False)
            request_ids.append(submission.request_id)
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < len(request_ids):
            output = done.get()
            if output.error is not None:
                raise EngineError(f"generating training texts failed: {output.error}")
            outputs[output.request_id] = output
            self._on_count(what, len(outputs), len(request_ids))
        return [outputs[request_id] for request_id in request_ids]


def whole_sentences(text: str) -> str:
    """Without an incomplete last sentence, if there is a complete one before it."""
    ends = [match.start() for match in _SENTENCE_END.finditer(text.strip() + " ")]
    return text.strip()[: ends[-1]] if ends else text.strip()


def _ids(token_ids: Sequence[int]) -> Ids:
    return np.array(token_ids, dtype=np.int32)


def _held_out(texts: Sequence[str], most: int) -> list[bool]:
    """Which texts are held out; none that occurs twice."""
    counts = Counter(texts)
    return [_is_held_out(idx, most) and counts[text] == 1 for idx, text in enumerate(texts)]


def _is_held_out(idx: int, most: int) -> bool:
    return idx % _HELD_OUT_EVERY == _HELD_OUT_EVERY // 2 and idx < _HELD_OUT_EVERY * most
