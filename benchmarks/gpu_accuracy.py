"""How far bfloat16 on a GPU is from float32: Slipstream beside transformers, on the same prompts and weights.

The reference is transformers in float32 on the CPU. 50 prompts, 64 greedy tokens each. Two questions: the mean error of
the logits, as a ratio of the two engines in bfloat16; and whether every first token that differs from the reference is
a near-tie there, with less than 0.25 between its two largest logits.

    python benchmarks/gpu_accuracy.py [--model smollm2-135m] [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.checkpoints.hub import resolve_model
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import EngineOptions
from slipstream.engine.build import Engine, build_engine
from slipstream.request import Request
from slipstream.sampling_params import SamplingParams

TOPICS = ("the sea", "a lost key", "tomatoes", "prime numbers", "winter")
TOPICS += ("an old bridge", "a bee", "glass", "chess", "the moon")
FORMS = ("Tell me about {}.", "Write a poem on {}.", "What is {}?", "List three facts about {}.", "Why does {} matter?")
PROMPTS = [form.format(topic) for form in FORMS for topic in TOPICS]
NUM_TOKENS, MAX_RATIO, MAX_GAP = 64, 1.2, 0.25


def transformers_model(path: Path, dtype: torch.dtype, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(path)
    config = AutoConfig.for_model(**{**checkpoint.config, "model_type": checkpoint.config["model_type"]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    assert not unexpected and all(name.startswith("lm_head") for name in missing), (missing, unexpected)
    model.tie_weights()
    model.generation_config.eos_token_id = None  # no request ends early
    return model.to(dtype).to(device).eval()


@torch.inference_mode()
def continuations(model: Any, prompts: list[list[int]], device: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens of the reference, and its logits at each of them."""
    tokens, logits = [], []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt], device=device),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )[0].tolist()
        tokens.append(out[len(prompt) :])
        logits.append(forced(model, prompt, tokens[-1], device))
    return tokens, logits


@torch.inference_mode()
def forced(model: Any, prompt: list[int], tokens: list[int], device: str) -> torch.Tensor:
    """Logits before each of the tokens, given those before it: [num_tokens, vocab] float32 on the CPU."""
    found = model(torch.tensor([prompt + tokens], device=device)).logits[0]
    return found[len(prompt) - 1 : -1].float().cpu()


def greedy(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
    """All prompts as one batch, and the logits that each token was chosen from."""
    core, seen = engine.core, []
    model, launch = core.runner.program.model, core.runner.launch
    compute = model.compute_logits
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    logits: dict[str, list[torch.Tensor]] = {str(i): [] for i in range(len(prompts))}

    def compute_and_keep(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    def launch_and_keep(plan: Any) -> Any:
        step = launch(plan)
        for idx, scheduled in enumerate(plan.requests):
            if scheduled.samples:
                logits[scheduled.request_id].append(seen[-1][idx].float().cpu())
        seen.clear()
        return step

    model.compute_logits, core.runner.launch = compute_and_keep, launch_and_keep
    params = SamplingParams(temperature=0.0, seed=0).with_defaults(SamplingParams())
    for i, prompt in enumerate(prompts):
        core.add(Request(str(i), tuple(prompt), params, (), len(prompt) + NUM_TOKENS))
    while core.has_work:
        for update in core.step():
            tokens[update.request_id] += update.token_ids
    model.compute_logits, core.runner.launch = compute, launch
    return list(tokens.values()), list(logits.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    prepare_folder(options.output_dir)
    path = resolve_model(options.model)
    tokenizer = open_checkpoint(path).tokenizer()
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS[: options.prompts]]
    dtype = getattr(torch, options.dtype)

    expected, reference = continuations(transformers_model(path, torch.float32, "cpu"), prompts, "cpu")
    theirs = transformers_model(path, dtype, options.device)
    peer = [forced(theirs, p, t, options.device) for p, t in zip(prompts, expected, strict=True)]
    del theirs
    engine_options = {"model": str(path), "device": options.device, "dtype": options.dtype, "max_num_seqs": 64}
    # Launch by launch for the logits; the tokens once more in graphs, as users run it.
    eager = build_engine(EngineOptions.from_dict({**engine_options, "cudagraph_mode": "none"}))
    tokens, logits = greedy(eager, prompts)
    recorded = greedy_tokens(build_engine(EngineOptions.from_dict(engine_options)), prompts)

    own_error, peer_error, count, mismatches, worst_gap = 0.0, 0.0, 0, 0, 0.0
    for i, reference in enumerate(expected):
        for got in (tokens[i], recorded[i]):
            at = next((j for j, (a, b) in enumerate(zip(reference, got, strict=True)) if a != b), None)
            if at is not None:
                first, second = reference[i][at].topk(2).values.tolist()
                mismatches, worst_gap = mismatches + 1, max(worst_gap, first - second)
        # Up to and including the first difference the two have read the same tokens.
        same = next((j + 1 for j, (a, b) in enumerate(zip(reference, tokens[i], strict=True)) if a != b), NUM_TOKENS)
        own_error += sum((logits[i][j] - reference[i][j]).abs().mean().item() for j in range(same))
        peer_error += sum((peer[i][j] - reference[i][j]).abs().mean().item() for j in range(same))
        count += same
    ratio = own_error / max(peer_error, 1e-9)
    row = {"case": "smollm2-135m accuracy", "batch": len(prompts), "tok_s": None, "positions": count}
    row |= {"mean_error": own_error / count, "transformers_mean_error": peer_error / count, "ratio": ratio}
    row |= {"first_mismatches": mismatches, "largest_gap": worst_gap}
    path = write_results(collect_results([row], device=options.device), options.output_dir, "gpu-accuracy")
    print(f"mean logit error {own_error / count:.4f}, transformers {peer_error / count:.4f}: {ratio:.2f} x", end=" ")
    print(f"(at most {MAX_RATIO}), over {count} positions")
    print(f"{mismatches} first mismatches in {2 * len(prompts)} runs, largest gap {worst_gap:.3f} (below {MAX_GAP})")
    print(f"written to {path}")
    return 0 if ratio <= MAX_RATIO and worst_gap < MAX_GAP else 1


def greedy_tokens(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, seed=0).with_defaults(SamplingParams())
    for i, prompt in enumerate(prompts):
        engine.core.add(Request(str(i), tuple(prompt), params, (), len(prompt) + NUM_TOKENS))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.core.has_work:
        for update in engine.core.step():
            tokens[update.request_id] += update.token_ids
    return list(tokens.values())


if __name__ == "__main__":
    sys.exit(main())
