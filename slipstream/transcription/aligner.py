"""A speech model's weights of attention for finished texts, from a copy of the model on the CPU.

The engine may be in another process or on a GPU, and its kernels have no weights of attention in memory. So a second,
small pass is computed here, for those alone who ask for times of words.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.encoder_input import EncoderInput
from slipstream.errors import RequestError
from slipstream.fields import Fields
from slipstream.models.load import Placement, built_under, load_weights, open_decoder
from slipstream.models.registry import architecture_of
from slipstream.models.whisper import Whisper
from slipstream.models.whisper_alignment import cross_weights

ALIGNMENT_HEADS = "alignment_heads"
Heads = tuple[tuple[int, int], ...]


class Aligner:
    """Opens the model when it is first needed. May be called from any thread; calls run one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._opened: tuple[Whisper, Heads] | None = None

    def weights(
        self, features: EncoderInput, token_ids: Sequence[int], num_frames: int
    ) -> npt.NDArray[np.float32]:  # [num_heads, num_tokens, num_entries]
        """Of the heads that follow the speech, over the first ``num_frames`` of the window."""
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            model, heads = self._opened
            shape = model.config.source_encoder
            assert shape is not None
            ids, given = torch.tensor(token_ids, dtype=torch.int32), torch.from_numpy(features.features)
            num_entries = max(1, num_frames // shape.frames_per_entry)
            weights: npt.NDArray[np.float32] = cross_weights(model, given, ids, heads, num_entries).numpy()
            return weights

    def _open(self) -> tuple[Whisper, Heads]:
        checkpoint = open_decoder(self._path)
        architecture = architecture_of(checkpoint.config)
        config = architecture.read_config(checkpoint.config)
        with built_under(Placement(torch.device("cpu"), torch.float32)):
            model = architecture(config, config.max_position)
        if not isinstance(model, Whisper):
            raise RequestError(f"{config.architecture} has no cross attention that times of words could be read from")
        load_weights(model, checkpoint.tensors())
        model.finish_weights()
        return model, read_alignment_heads(checkpoint, config.num_layers, config.num_heads)


def read_alignment_heads(checkpoint: Checkpoint, num_layers: int, num_heads: int) -> Heads:
    """Those that the model's makers name; else all heads of the last half of the layers, as openai/whisper has it."""
    fields = Fields.from_dict(checkpoint.generation_config, "generation_config.json")
    if not fields.has(ALIGNMENT_HEADS):
        return tuple((layer, head) for layer in range(num_layers // 2, num_layers) for head in range(num_heads))
    heads = fields.pairs(ALIGNMENT_HEADS)
    if not heads or any(layer >= num_layers or head >= num_heads for layer, head in heads):
        raise fields.refuse(ALIGNMENT_HEADS, f"a list of layers below {num_layers} and heads below {num_heads}")
    return tuple(heads)


@lru_cache(maxsize=1)
def open_aligner(path: Path) -> Aligner:
    """The model is in memory once in a process, however many requests use it."""
    return Aligner(path)
