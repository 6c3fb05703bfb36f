"""The public API: ``LLM`` for scripts, ``AsyncLLM`` for servers. Both run the engine in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from rich.progress import Progress, TextColumn

from slipstream.audio.files import Sound
from slipstream.checkpoints.hub import with_shipped_head
from slipstream.config import EngineConfig, EngineOptions
from slipstream.engine.build import Engine, build_engine, build_serving_engine
from slipstream.engine.client import EngineClient, Prompt, Submission
from slipstream.engine.stats import EngineStats
from slipstream.errors import EngineError, RequestError
from slipstream.output import EmbeddingOutput, RequestOutput
from slipstream.pooled_tasks import AsyncPooledTasks, PooledTasks, as_prompts, prepare_all
from slipstream.sampling_params import SamplingParams
from slipstream.speculate.options import synthetic_warning
from slipstream.text.tokenizer import Tokenizer
from slipstream.transcription.many import as_sounds, describe_sound, run_coroutine, transcribe_all
from slipstream.transcription.options import TranscriptionOptions
from slipstream.transcription.result import Transcription

logger = logging.getLogger("slipstream")

Message = Mapping[str, Any]
Output = TypeVar("Output", RequestOutput, EmbeddingOutput)


class _EngineOwner:
    """The common part of both: building the engine, and closing it.

    ``options`` are those of ``EngineOptions``. Where they do not mention speculation, a model whose draft head is
    shipped with the package uses it, as on the command line: it changes the speed and not the text. ``build`` replaces
    the options where the caller builds the engine. With ``own_process`` the engine runs in its own process, as in the
    server.
    """

    _serves_many = False  # requests come from callers that know nothing of each other

    def __init__(
        self,
        model: str | None = None,
        *,
        build: Callable[[], Engine] | None = None,
        own_process: bool = False,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = model
        chosen = with_shipped_head(EngineOptions.from_dict(options), by_default=True)
        # First of all: an error in speculative options must not cost the loading of a model.
        if (warning := synthetic_warning(chosen)) is not None:
            logger.warning(warning)
        if own_process:
            from slipstream.engine.process import EngineProcess  # needs the packages of the server

            self.client = EngineClient(lambda deliver: EngineProcess(chosen, deliver))
        else:
            self.client = EngineClient.in_thread(build or self._build(chosen))

    def _build(self, options: EngineOptions) -> Callable[[], Engine]:
        return lambda: build_serving_engine(options) if self._serves_many else build_engine(options)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.client.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self.client.config

    @property
    def stats(self) -> EngineStats:
        return self.client.stats

    def close(self) -> None:
        """Stop the engine. Requests in flight end with finish reason ``abort``."""
        self.client.close()


class LLM(_EngineOwner, PooledTasks):
    """A model for synchronous code.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].text
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt (a string, or token ids); outputs come in the order of the prompts.

        Every prompt is checked before the first one runs. A request that fails later has ``error`` set. Waiting
        requests with a lower ``priority`` run first.
        """
        many = as_prompts(prompts)
        params = iter(_as_params(sampling_params, len(many)))
        submissions = prepare_all(many, lambda prompt: self.client.prepare(prompt, next(params), priority=priority))
        return self._run(submissions, partial(self.client.submit, every_token=False), "generating", progress)

    def transcribe(
        self,
        sounds: Sound | Sequence[Sound],
        options: TranscriptionOptions | None = None,
        *,
        priority: int = 0,
        progress: bool = False,
    ) -> list[Transcription]:
        """The text of each sound, with times, in the order of the sounds, by a speech model.

        A sound is a file's path, its bytes, or an array of samples of one channel at 16 kHz.
        """
        many = as_sounds(sounds)
        with _progress_bar(progress) as bar:
            tasks = [bar.add_task(describe_sound(sound, idx), total=1.0) for idx, sound in enumerate(many)]

            def show(idx: int, share: float) -> None:
                bar.update(tasks[idx], completed=share)

            return run_coroutine(transcribe_all(self.client, many, options or TranscriptionOptions(), priority, show))

    def _run(
        self,
        submissions: Sequence[Submission],
        submit: Callable[[Submission, Callable[[Output], None]], None],
        doing: str,
        progress: bool,
    ) -> list[Output]:
        """Start all of them and wait for their outputs, which come in their order."""
        done: queue.SimpleQueue[Output] = queue.SimpleQueue()
        outputs: dict[str, Output] = {}
        try:
            for submission in submissions:
                submit(submission, done.put)
            with _progress_bar(progress) as bar:
                task = bar.add_task(doing, total=len(submissions))
                while len(outputs) < len(submissions):
                    output = done.get()
                    outputs[output.request_id] = output
                    bar.update(task, advance=1)
        finally:
            # After Ctrl-C, or if the engine refused one: the others have no reader any more.
            for submission in submissions:
                if submission.request_id not in outputs:
                    self.client.forget(submission)
        return [outputs[submission.request_id] for submission in submissions]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.tokenizer.encode_chat(list(conversation)) for conversation in conversations]
        return self.generate(prompts, sampling_params, priority=priority, progress=progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield an output for every new piece of text of one prompt; leaving the loop early aborts the request."""
        submission = self.client.prepare(prompt, sampling_params or SamplingParams())
        arrived: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self.client.submit(submission, arrived.put)
        finished = False
        try:
            while not finished:
                output = arrived.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.client.forget(submission)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncLLM(_EngineOwner, AsyncPooledTasks):
    """The same engine for asyncio: many callers, each with its own stream of outputs."""

    _serves_many = True

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield an output for every new piece of text. A closed or cancelled stream aborts its request."""
        submission = self.client.prepare(prompt, sampling_params or SamplingParams(), request_id, priority)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[RequestOutput] = asyncio.Queue()

        def sink(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, output)

        self.client.submit(submission, sink)
        finished = False
        try:
            while not finished:
                output = await arrived.get()
                finished = output.finished
                if output.error is not None:
                    raise RequestError(output.error) if output.finish_reason == "error" else EngineError(output.error)
                yield output
        finally:
            if not finished:
                self.client.forget(submission)

    async def transcribe(
        self, sounds: Sound | Sequence[Sound], options: TranscriptionOptions | None = None, *, priority: int = 0
    ) -> list[Transcription]:
        """As ``LLM.transcribe``. A cancelled call aborts its requests."""
        return await transcribe_all(self.client, as_sounds(sounds), options or TranscriptionOptions(), priority)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt = self.tokenizer.encode_chat(list(messages))
        async for output in self.generate(prompt, sampling_params, request_id=request_id):
            yield output

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Waits for the engine's threads, which must not block the event loop.
        await asyncio.to_thread(self.close)

    def abort(self, request_id: str) -> None:
        """End a request; its stream yields a last output with finish reason ``abort``."""
        self.client.abort(request_id)


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} sampling parameters; give one for all, or one each")
    return list(params)


def _progress_bar(shown: bool) -> Progress:
    return Progress(*Progress.get_default_columns(), TextColumn("{task.completed} of {task.total}"), disable=not shown)
