"""A tiny random Whisper, written by ``transformers``, and inputs for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from slipstream.encoder_input import EncoderInput, EncoderPrompt
from tests import tiny_models

NUM_BINS, MAX_ENTRIES = 8, 50
_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB_SIZE,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "num_mel_bins": NUM_BINS,
    "max_source_positions": MAX_ENTRIES,
    "max_target_positions": 128,
    "init_std": 0.3,  # large enough that the most likely token changes from step to step
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": tiny_models.EOS_ID,
    "decoder_start_token_id": 258,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def build(seed: int = 0, **changes: Any) -> WhisperForConditionalGeneration:
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**_SHAPE, **changes})).eval()
    # transformers begins with zeros where a checkpoint has learned numbers, which would test nothing.
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif "decoder.embed_positions" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    return model


def save(model: WhisperForConditionalGeneration, folder: Path) -> Path:
    return tiny_models.save(model, folder)


def make_prompts(count: int, num_frames: int = 2 * MAX_ENTRIES) -> list[EncoderPrompt]:
    """Different inputs, and prompts of different lengths."""
    rng = np.random.default_rng(7)
    shape, starts = (NUM_BINS, num_frames), [258, 5, 7, 9, 11, 5, 7, 9]
    return [
        EncoderPrompt(starts[: 1 + i % len(starts)], EncoderInput(rng.standard_normal(shape).astype(np.float32)))
        for i in range(count)
    ]


def greedy(model: WhisperForConditionalGeneration, prompt: EncoderPrompt, num_tokens: int) -> list[int]:
    """The likeliest tokens, each from the whole text, in float64."""
    model = model.double()
    features, text = torch.from_numpy(prompt.encoder.features).double()[None], list(prompt.token_ids)
    with torch.no_grad():
        encoded = model.model.encoder(features)
        for _ in range(num_tokens):
            logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([text])).logits[0, -1]
            text.append(int(logits.argmax()))
    return text[len(prompt.token_ids) :]
