"""Several streams at a time from asyncio; one of them is ended early.

python examples/async_stream.py [--model smollm2-135m] [--max-tokens 48]
"""

from __future__ import annotations

import argparse
import asyncio

from slipstream import AsyncLLM, SamplingParams

STORIES = {"robot": "Once upon a time a robot", "river": "The river was so wide that", "clock": "At midnight the clock"}


async def write(engine: AsyncLLM, name: str, prompt: str, max_tokens: int) -> str:
    text = ""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=max_tokens)
    async for output in engine.generate(prompt, params, request_id=name):
        text += output.delta_text
        if name == "clock" and len(output.token_ids) >= 8:
            engine.abort(name)  # the stream ends with finish reason "abort"
        if output.finished:
            print(f"{name} ended with {output.finish_reason}: {prompt}{text!r}")
    return text


async def run(model: str, max_tokens: int) -> None:
    async with AsyncLLM(model, max_num_seqs=len(STORIES)) as engine:
        await asyncio.gather(*(write(engine, name, prompt, max_tokens) for name, prompt in STORIES.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args()
    asyncio.run(run(options.model, options.max_tokens))


if __name__ == "__main__":
    main()
