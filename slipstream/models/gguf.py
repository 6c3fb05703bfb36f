"""GGUF checkpoints: llama.cpp's names and layouts translated to Hugging Face's.

Knows, for each supported architecture, how its tensors are called and what llama.cpp's converter did to the weights
that must be undone. The table ``ARCHITECTURES`` is the place to add another one. Needs the ``gguf`` package for the
block encodings only, and imports it when the first file is opened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.errors import ModelError
from slipstream.models.gguf_config import Metadata, generation_config, model_config
from slipstream.models.gguf_file import GGUFFile, TensorEntry
from slipstream.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures maps to a Hugging Face model."""

    model_class: str
    model_type: str
    # llama.cpp rotates neighbouring rows of q and k where Hugging Face rotates halves; its converter reorders the rows.
    rotary_rows_permuted: bool = False
    # Tokens that end a turn besides those the file names, as in the model's own generation_config.json.
    end_tokens: tuple[str, ...] = ()


_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_LLAMA3_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", rotary_rows_permuted=True, end_tokens=_LLAMA3_ENDS),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", end_tokens=_QWEN_ENDS),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", end_tokens=_QWEN_ENDS),
}

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_PIECE_ELEMENTS = 1 << 20


class GGUFCheckpoint:
    """One GGUF file, seen as a Hugging Face checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._codec = BlockCodec()
        self._file = GGUFFile(path, self._codec.block_sizes)
        metadata = Metadata(self._file.metadata, path)
        self._architecture = self._find_architecture(metadata)
        entries = {entry.name: entry for entry in self._file.tensors}
        factors = entries.pop(_ROPE_FACTORS, None)
        self._entries = {self._translate(name): entry for name, entry in entries.items()}
        self.config: dict[str, Any] = {
            "architectures": [self._architecture.model_class],
            "model_type": self._architecture.model_type,
            "torch_dtype": self._codec.dtype_name(self._file.tensors),
            **model_config(metadata, {name: entry.shape for name, entry in self._entries.items()}),
        }
        if factors is not None:
            # Divisors of the inverse frequencies: the form in which GGUF keeps Llama 3's rope scaling.
            self.config["rope_freq_factors"] = self._decode(factors).flatten().tolist()
        self.generation_config = generation_config(metadata, self._architecture.end_tokens)

    def tensor_names(self) -> list[str]:
        return list(self._entries)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, entry in self._entries.items():
            tensor = self._decode(entry)
            if self._architecture.rotary_rows_permuted and ".self_attn.q_proj." in name:
                tensor = unpermute_rotary_rows(tensor, self.config["num_attention_heads"])
            elif self._architecture.rotary_rows_permuted and ".self_attn.k_proj." in name:
                tensor = unpermute_rotary_rows(tensor, self.config["num_key_value_heads"])
            yield name, tensor

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self._file.metadata, self.path)

    def _decode(self, entry: TensorEntry) -> torch.Tensor:
        try:
            return self._codec.decode(self._file.raw(entry), entry)
        except UnreadableBlocks as error:
            raise ModelError(f"{self.path}: {error}; use another quantisation of this model") from error

    def _find_architecture(self, metadata: Metadata) -> Architecture:
        if metadata.values.get("split.count", 1) > 1:
            raise ModelError(f"{self.path} is one of several parts; merge them first with llama-gguf-split --merge")
        if metadata.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{self.path} is of architecture '{metadata.architecture}'; "
                f"supported in GGUF files: {', '.join(ARCHITECTURES)}"
            )
        return ARCHITECTURES[metadata.architecture]

    def _translate(self, name: str) -> str:
        if match := _LAYER_TENSOR.fullmatch(name):
            layer, kind, suffix = match.groups()
            if kind in _LAYER_NAMES:
                return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"
        stem, _, suffix = name.rpartition(".")
        if stem in _MODEL_NAMES and suffix in ("weight", "bias"):
            return f"{_MODEL_NAMES[stem]}.{suffix}"
        raise ModelError(
            f"{self.path} holds {name}, which {self._architecture.model_class} does not have; not supported"
        )


def unpermute_rotary_rows(
    weight: torch.Tensor,  # [num_heads * head_dim, ...], each head's rows as (pair, half)
    num_heads: int,
) -> torch.Tensor:  # the same shape, each head's rows as (half, pair)
    """Undo llama.cpp's reordering of q and k rows: neighbours (2i, 2i + 1) go back to (i, i + head_dim / 2)."""
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


class UnreadableBlocks(Exception):  # noqa: N818  says what, like StopIteration
    """A block encoding that the package knows by name only."""


class BlockCodec:
    """From the bytes of a file to tensors; the block encodings are those of the ``gguf`` package."""

    def __init__(self) -> None:
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise ModelError("reading GGUF files needs the gguf package: pip install gguf") from error
        self.block_sizes = {int(kind): (int(size[0]), int(size[1])) for kind, size in GGML_QUANT_SIZES.items()}
        self._kinds = GGMLQuantizationType
        self._dequantize = dequantize
        self._plain = {
            int(GGMLQuantizationType.F32): torch.float32,
            int(GGMLQuantizationType.F16): torch.float16,
            int(GGMLQuantizationType.BF16): torch.bfloat16,
        }

    def decode(self, raw: npt.NDArray[np.uint8], entry: TensorEntry) -> torch.Tensor:
        """Floats keep their type; block encodings become float32. The result owns its memory."""
        if (dtype := self._plain.get(entry.type_id)) is not None:
            return torch.from_numpy(np.array(raw)).view(dtype).reshape(entry.shape)
        kind = self._kinds(entry.type_id)
        row_len = entry.shape[-1]
        num_rows = math.prod(entry.shape[:-1])
        values = np.empty((num_rows, row_len), dtype=np.float32)
        packed = raw.reshape(num_rows, -1)
        # In pieces, because the package holds everything twice while it works.
        step = max(1, _PIECE_ELEMENTS // row_len)
        try:
            for start in range(0, num_rows, step):
                values[start : start + step] = self._dequantize(packed[start : start + step], kind)
        except NotImplementedError:
            raise UnreadableBlocks(f"{entry.name} is stored as {kind.name}, which cannot be read") from None
        return torch.from_numpy(values).reshape(entry.shape)

    def dtype_name(self, entries: list[TensorEntry]) -> str:
        """The type of most weights as ``decode`` gives them."""
        counts = {"float32": 0}
        for entry in entries:
            name = str(self._plain.get(entry.type_id, torch.float32)).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + math.prod(entry.shape)
        return max(counts, key=lambda name: counts[name])
