"""Several sounds at a time: one is decoded, and its features computed, while others are in the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from slipstream.audio.files import Sound
from slipstream.engine.client import EngineClient
from slipstream.transcription.engine_model import open_speech_model
from slipstream.transcription.options import TranscriptionOptions
from slipstream.transcription.result import Transcription
from slipstream.transcription.transcriber import prepare_sound, transcribe_sound

T = TypeVar("T")
OnShare = Callable[[int, float], None]  # the index of a sound, and the share of it that is done

_MAX_DECODED = 2  # sounds decoded at a time; each is in memory whole


def as_sounds(sounds: Sound | Sequence[Sound]) -> list[Sound]:
    return [sounds] if isinstance(sounds, str | Path | bytes | np.ndarray) else list(sounds)


def describe_sound(sound: Sound, idx: int) -> str:
    """For messages and progress."""
    return Path(sound).name if isinstance(sound, str | Path) else f"sound {idx}"


async def transcribe_all(
    client: EngineClient,
    sounds: Sequence[Sound],
    options: TranscriptionOptions,
    priority: int = 0,
    on_share: OnShare | None = None,
) -> list[Transcription]:
    """In the order of the sounds. The first error ends all of them."""
    model = open_speech_model(client, priority)
    decoding = asyncio.Semaphore(_MAX_DECODED)
    # So many sounds as fill the engine; their features are in memory.
    running = asyncio.Semaphore(max(_MAX_DECODED, model.max_at_once))

    async def run(idx: int, sound: Sound) -> Transcription:
        async with running:
            name = str(sound) if isinstance(sound, str | Path) else describe_sound(sound, idx)
            async with decoding:
                prepared = await asyncio.to_thread(prepare_sound, sound, name, model, options.batched)

            def tell(_segments: Any, share: float) -> None:
                if on_share is not None:
                    on_share(idx, share)

            return await transcribe_sound(model, prepared, options, tell)

    tasks = [asyncio.ensure_future(run(idx, sound)) for idx, sound in enumerate(sounds)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it to its end from synchronous code, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(asyncio.run(coroutine))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="slipstream-transcribe", daemon=True).start()
    return found.result()
