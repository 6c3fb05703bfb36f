"""Train an EAGLE-3 head for a model from texts that the model writes, then draft with it.

The defaults are a try-out of some minutes on a CPU; docs/training.md says what a good head takes.

python examples/train_head.py --out ./my-head [--model smollm2-135m] [--steps 50]
"""

from __future__ import annotations

import argparse

from slipstream import LLM, SamplingParams
from slipstream.cli import main as slipstream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=192)
    parser.add_argument("--draft-vocab", type=int, default=4000)
    options = parser.parse_args()

    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items()]
    batch = f"--batch-tokens={8 * options.max_len}"
    if slipstream(["train", "eagle3", *arguments, batch, "--draft-steps=3"]) != 0:
        raise SystemExit("the training did not end well")

    with LLM(options.model, speculate="eagle3", draft_model=options.out, k=3, max_num_seqs=1) as llm:
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        output = llm.chat(chat, SamplingParams(temperature=0, max_tokens=48))[0]
        print(output.text)
        if output.speculation is not None:
            print(f"{output.speculation.mean_length:.2f} tokens a step, acceptance by position:")
            print(output.speculation.as_dict()["acceptance_by_position"])


if __name__ == "__main__":
    main()
