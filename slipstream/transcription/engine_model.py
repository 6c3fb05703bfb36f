"""A speech model that an engine runs, for callers on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.encoder_input import EncoderInput, EncoderPrompt
from slipstream.engine.client import EngineClient
from slipstream.errors import EngineError, RequestError
from slipstream.output import RequestOutput
from slipstream.sampling_params import SamplingParams
from slipstream.transcription.speech_tokens import SpeechTokens
from slipstream.transcription.window import SpeechModel

_NO_SPEECH_MODEL = "this model reads no sound; transcribing needs a speech model such as Whisper"


def open_speech_model(client: EngineClient, priority: int = 0) -> SpeechModel:
    """Raises ``RequestError`` if the engine's model does not read sound."""
    config = client.config
    encoder = config.model.source_encoder
    if encoder is None:
        raise RequestError(_NO_SPEECH_MODEL)

    async def decode(prompt: EncoderPrompt, params: SamplingParams) -> RequestOutput:
        return await run_request(client, prompt, params, priority)

    async def align(features: EncoderInput, token_ids: Sequence[int], num_frames: int) -> npt.NDArray[np.float32]:
        from slipstream.transcription.aligner import open_aligner  # imports networks, which few front ends need

        aligner = open_aligner(Path(client.running.info.model_path))
        return await asyncio.to_thread(aligner.weights, features, token_ids, num_frames)

    return SpeechModel(
        decode=decode,
        align=align,
        tokenizer=client.tokenizer,
        tokens=SpeechTokens.from_tokenizer(client.tokenizer),
        suppressed=client.running.info.defaults,
        num_bands=encoder.num_bins,
        window_frames=encoder.max_frames,
        context_len=config.scheduler.max_model_len,
        # Enough that a finished one is followed at once; each has its features in memory.
        max_at_once=2 * config.scheduler.max_num_seqs,
    )


async def run_request(
    client: EngineClient, prompt: EncoderPrompt, params: SamplingParams, priority: int
) -> RequestOutput:
    """One request to its end. A cancelled call aborts it."""
    submission = client.prepare(prompt, params, priority=priority)
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[RequestOutput] = loop.create_future()

    def take(output: RequestOutput) -> None:
        if not finished.done():
            finished.set_result(output)

    def sink(output: RequestOutput) -> None:
        loop.call_soon_threadsafe(take, output)

    client.submit(submission, sink, every_token=False)
    try:
        output = await finished
    except BaseException:
        client.forget(submission)
        raise
    if output.error is not None:
        raise RequestError(output.error) if output.outputs[0].finish_reason == "error" else EngineError(output.error)
    return output
