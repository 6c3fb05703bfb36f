"""OpenAI's own client against a running server: a whole answer, then a stream.

slipstream serve smollm2-135m --port 8000    # in another terminal
pip install openai
python examples/server_client.py [--url http://127.0.0.1:8000] [--max-tokens 48]
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=options.max_tokens,
    )
    print(f"{model}: {answer.choices[0].message.content}")

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Count from one to ten."}],
        temperature=0,
        max_tokens=options.max_tokens,
        stream=True,
        extra_body={"max_k": 2},  # at most two drafts a step for this request
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
