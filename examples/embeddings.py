"""Vectors of texts, and which texts are nearest to a question. Any decoder works; one trained for it works better.

python examples/embeddings.py [--model Qwen/Qwen3-Embedding-0.6B]
"""

from __future__ import annotations

import argparse

import numpy as np

from slipstream import LLM

TEXTS = [
    "Paris is the capital of France.",
    "A brick is made of clay.",
    "The Seine flows through Paris.",
    "Python is a programming language.",
]
QUESTION = "Which city is the capital of France?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()

    with LLM(options.model, speculate="none", max_num_seqs=len(TEXTS) + 1) as llm:
        outputs = llm.embed([QUESTION, *TEXTS], pooling="mean", normalize=True)
    question, *texts = (output.embedding for output in outputs)
    similarity = np.stack(texts) @ question  # vectors of length one: the cosine of their angle
    for place in np.argsort(-similarity):
        print(f"{similarity[place]:.3f}  {TEXTS[place]}")


if __name__ == "__main__":
    main()
