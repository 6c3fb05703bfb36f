"""Vectors, scores and classes of texts: what ``LLM`` and ``AsyncLLM`` offer beside generating."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slipstream.encoder_input import EncoderPrompt
from slipstream.engine.client import EngineClient, Prompt, Submission
from slipstream.engine.pooled_prompt import TextOptions
from slipstream.engine.scores import PairScores, rank
from slipstream.errors import EngineError, RequestError
from slipstream.output import ClassificationOutput, EmbeddingOutput, RerankOutput, ScoreOutput
from slipstream.pooling import PoolingParams

Texts = str | Sequence[str]


class PooledTasks:
    """For synchronous code. ``_run`` starts submissions and waits for their outputs, in order."""

    client: EngineClient
    _run: Callable[..., list[Any]]

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
        progress: bool = False,
    ) -> list[EmbeddingOutput]:
        """A vector for each text (a string, or token ids), in the order of the texts.

        ``pooling`` says which of the last layer's hidden states make it; None is what the checkpoint says.
        ``dimensions`` keeps so many of its first numbers; then it is divided by its length, unless ``normalize`` or, in
        its place, the checkpoint says no. Longer texts than ``truncate_prompt_tokens`` are cut, with -1 to what the
        model takes. ``prompt_name`` is one of the checkpoint's own prompts, which is put before each text.
        """
        params, options = (
            PoolingParams(pooling, normalize, dimensions),
            TextOptions(truncate_prompt_tokens, prompt_name),
        )
        submissions = _prepare_vectors(self.client, as_prompts(texts), params, options, priority)
        found: list[EmbeddingOutput] = self._run(submissions, self.client.submit_pooled, "embedding", progress)
        return found

    def score(
        self,
        first: Texts,
        second: Texts,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        priority: int = 0,
        progress: bool = False,
    ) -> list[ScoreOutput]:
        """How well each text of ``second`` fits the one of ``first``, or those in the same places.

        A model that reads pairs scores them; of any other it is the cosine of two vectors.
        """
        options = TextOptions(truncate_prompt_tokens, instruction=instruction)
        plan = PairScores.plan(self.client.pooling, _as_texts(first), _as_texts(second))
        submissions = _prepare_pairs(self.client, plan, options, priority)
        return _scores_of(plan, self._run(submissions, self.client.submit_pooled, "scoring", progress))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        priority: int = 0,
        progress: bool = False,
    ) -> list[RerankOutput]:
        """The documents from the best fitting one on, at most ``top_n`` of them."""
        scores = self.score(
            query,
            _as_texts(documents),
            truncate_prompt_tokens=truncate_prompt_tokens,
            instruction=instruction,
            priority=priority,
            progress=progress,
        )
        return _ranked(scores, documents, top_n)

    def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        progress: bool = False,
    ) -> list[ClassificationOutput]:
        """The probability of each label of the checkpoint's classifier, for each text."""
        options = TextOptions(truncate_prompt_tokens)
        submissions = _prepare_classes(self.client, as_prompts(texts), options, priority)
        outputs = self._run(submissions, self.client.submit_pooled, "classifying", progress)
        return [_class_of(self.client.pooling.labels, output) for output in outputs]


class AsyncPooledTasks:
    """The same for asyncio. A cancelled call aborts its requests."""

    client: EngineClient

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
    ) -> list[EmbeddingOutput]:
        """As ``LLM.embed``."""
        params, options = (
            PoolingParams(pooling, normalize, dimensions),
            TextOptions(truncate_prompt_tokens, prompt_name),
        )
        return await self._run_pooled(_prepare_vectors(self.client, as_prompts(texts), params, options, priority))

    async def score(
        self,
        first: Texts,
        second: Texts,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        priority: int = 0,
    ) -> list[ScoreOutput]:
        """As ``LLM.score``."""
        options = TextOptions(truncate_prompt_tokens, instruction=instruction)
        plan = PairScores.plan(self.client.pooling, _as_texts(first), _as_texts(second))
        return _scores_of(plan, await self._run_pooled(_prepare_pairs(self.client, plan, options, priority)))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        priority: int = 0,
    ) -> list[RerankOutput]:
        """As ``LLM.rerank``."""
        scores = await self.score(
            query,
            _as_texts(documents),
            truncate_prompt_tokens=truncate_prompt_tokens,
            instruction=instruction,
            priority=priority,
        )
        return _ranked(scores, documents, top_n)

    async def classify(
        self, texts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None, priority: int = 0
    ) -> list[ClassificationOutput]:
        """As ``LLM.classify``."""
        options = TextOptions(truncate_prompt_tokens)
        outputs = await self._run_pooled(_prepare_classes(self.client, as_prompts(texts), options, priority))
        return [_class_of(self.client.pooling.labels, output) for output in outputs]

    async def _run_pooled(self, submissions: Sequence[Submission]) -> list[EmbeddingOutput]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[EmbeddingOutput] = asyncio.Queue()

        def sink(output: EmbeddingOutput) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, output)

        outputs: dict[str, EmbeddingOutput] = {}
        try:
            for submission in submissions:
                self.client.submit_pooled(submission, sink)
            while len(outputs) < len(submissions):
                output = await arrived.get()
                outputs[output.request_id] = output
        finally:
            for submission in submissions:
                if submission.request_id not in outputs:
                    self.client.forget(submission)
        return [outputs[submission.request_id] for submission in submissions]


def prepare_all(prompts: Sequence[Any], prepare: Callable[[Any], Submission]) -> list[Submission]:
    """Check every prompt before the first one runs."""
    submissions = []
    for i, prompt in enumerate(prompts):
        try:
            submissions.append(prepare(prompt))
        except RequestError as error:
            raise RequestError(str(error) if len(prompts) == 1 else f"prompt {i}: {error}") from error
    return submissions


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | EncoderPrompt) or not hasattr(prompts, "__len__"):
        return [prompts]  # type: ignore[list-item]  # an invalid prompt is refused later
    many = list(prompts)
    # A list that begins with a text, a list or an EncoderPrompt holds several prompts; any other is one of token ids.
    is_many = not many or isinstance(many[0], str | EncoderPrompt) or hasattr(many[0], "__len__")
    return many if is_many else [prompts]  # type: ignore[return-value, list-item]


def _as_texts(texts: Texts) -> list[str]:
    many = [texts] if isinstance(texts, str) else list(texts)
    if not all(isinstance(text, str) for text in many):
        raise RequestError("texts to score must be strings")
    return many


def _prepare_vectors(
    client: EngineClient, texts: Sequence[Prompt], params: PoolingParams, options: TextOptions, priority: int
) -> list[Submission]:
    return prepare_all(texts, partial(client.prepare_pooled, pooling=params, priority=priority, options=options))


def _prepare_pairs(client: EngineClient, plan: PairScores, options: TextOptions, priority: int) -> list[Submission]:
    if plan.are_scored:
        return prepare_all(plan.items, partial(client.prepare_scored, priority=priority, options=options))
    texts = [item for item in plan.items if isinstance(item, str)]
    return _prepare_vectors(client, texts, PoolingParams(), options, priority)


def _prepare_classes(
    client: EngineClient, texts: Sequence[Prompt], options: TextOptions, priority: int
) -> list[Submission]:
    assert client.pooling.labels
    return prepare_all(texts, partial(client.prepare_scored, priority=priority, options=options))


def _scores_of(plan: PairScores, outputs: Sequence[EmbeddingOutput]) -> list[ScoreOutput]:
    errors = [next((outputs[i].error for i in pair if outputs[i].error), None) for pair in plan.pairs]
    if any(errors):
        raise EngineError(next(error for error in errors if error))
    scores = plan.of([output.embedding for output in outputs])
    counts = [sum(outputs[i].num_prompt_tokens for i in {*pair}) for pair in plan.pairs]
    return [ScoreOutput(*both) for both in zip(scores, counts, strict=True)]


def _ranked(scores: Sequence[ScoreOutput], documents: Sequence[str], top_n: int | None) -> list[RerankOutput]:
    if top_n is not None and (not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1):
        raise RequestError(f"top_n must be an integer of at least 1, not {top_n!r}")
    values = [output.score for output in scores]
    return [RerankOutput(idx, values[idx], documents[idx]) for idx in rank(values, top_n)]


def _class_of(labels: tuple[str, ...], output: EmbeddingOutput) -> ClassificationOutput:
    probs = output.embedding
    label = labels[int(probs.argmax())] if probs.size else ""
    return ClassificationOutput(label, probs, labels, output.num_prompt_tokens, output.error)
