"""The default model from its GGUF says, token for token, what ``transformers`` makes of the same file in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream import LLM, SamplingParams

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child in two sentences.",
    "List three prime numbers larger than ten.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Write a Python function that reverses a string.",
    "What is 12 times 12?",
]
NUM_TOKENS = 64


@pytest.fixture(scope="module", autouse=True)
def _both_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def answers(smollm2_path: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt and output tokens of each chat prompt, from one batched run."""
    with LLM(str(smollm2_path), dtype="float32") as llm:
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [(o.prompt_token_ids, o.token_ids) for o in llm.chat(conversations, params)]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    return model.eval()


def test_every_token_is_the_reference_models_choice(
    answers: list[tuple[list[int], list[int]]], reference: PreTrainedModel
) -> None:
    """One pass over prompt and answer: if each token is the argmax after its prefix, greedy decoding gives the same."""
    for prompt, output in answers:
        assert len(output) == NUM_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == output


@pytest.mark.slow
def test_generate_gives_the_same_tokens(answers: list[tuple[list[int], list[int]]], reference: PreTrainedModel) -> None:
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    for prompt, output in answers:
        inputs = torch.tensor([prompt])
        tokens = reference.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=NUM_TOKENS
        )
        assert tokens[0, len(prompt) :].tolist() == output
