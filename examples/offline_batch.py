"""Many prompts in one call: they run as a batch, which is much faster than one after another.

python examples/offline_batch.py [--model smollm2-135m] [--max-tokens 48]
"""

from __future__ import annotations

import argparse

from slipstream import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three uses of a brick.",
    "Who wrote Romeo and Juliet?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args()

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    with LLM(options.model, max_num_seqs=len(chats)) as llm:
        for question, output in zip(QUESTIONS, llm.chat(chats, params), strict=True):
            print(f"{question}\n    {output.text.strip()}")
            if output.speculation is not None:  # None where the engine drafts nothing
                print(f"    {output.speculation.num_accepted} of {output.speculation.num_drafts} drafts accepted")


if __name__ == "__main__":
    main()
