"""GGUF checkpoints: llama.cpp's names and layouts translated to Hugging Face's.

Knows, for each supported architecture, the names of its tensors and the changes by llama.cpp's converter that must be
undone. Another architecture is one more entry of ``ARCHITECTURES``. Needs the ``gguf`` package for the block encodings
only, and imports it when the first file is opened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.checkpoints.gguf_config import (
    Metadata,
    gemma3_settings,
    generation_config,
    model_config,
    pooling_defaults,
)
from slipstream.checkpoints.gguf_file import GGUFFile, TensorEntry
from slipstream.checkpoints.hf_config import MAX_EXPERTS, MAX_HEADS
from slipstream.checkpoints.sentence_transformers import DenseStep
from slipstream.checkpoints.tensor_header import TensorHeader
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.pooling import PoolingDefaults
from slipstream.text.tokenizer import Tokenizer
from slipstream.values import describe_value
from slipstream.weights.gguf_blocks import is_kept


@dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures maps to a Hugging Face model."""

    model_class: str
    model_type: str
    # llama.cpp rotates neighbouring rows of q and k where Hugging Face rotates halves; its converter reorders the rows.
    rotary_rows_permuted: bool = False
    # The converter adds the constant that Hugging Face's model adds at run time.
    norms_hold_one: bool = False
    # Names of a layer's tensors where they are not those of ``_LAYER_NAMES``.
    layer_names: Mapping[str, str] = field(default_factory=dict)
    has_experts: bool = False  # in one tensor for all of them, or one for each
    # Settings that llama.cpp hard-codes and Hugging Face has in the config.
    settings: Callable[[Metadata], dict[str, Any]] | None = None
    # The architecture of a file with a certain metadata key: llama.cpp runs some related models as one architecture.
    relatives: Mapping[str, Architecture] = field(default_factory=dict)
    # Tokens that end a turn besides those named in the file, as in the model's own generation_config.json.
    end_tokens: tuple[str, ...] = ()


_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_LLAMA3_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_PHI3_ENDS = ("<|endoftext|>", "<|assistant|>", "<|end|>")

_ROUTER = {"ffn_gate_inp": "mlp.gate"}

_MISTRAL = Architecture("MistralForCausalLM", "mistral", rotary_rows_permuted=True)
_MIXTRAL = Architecture(
    "MixtralForCausalLM", "mixtral", rotary_rows_permuted=True, layer_names=_ROUTER, has_experts=True
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        rotary_rows_permuted=True,
        relatives={"expert_count": _MIXTRAL, "attention.sliding_window": _MISTRAL},
        end_tokens=_LLAMA3_ENDS,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", end_tokens=_QWEN_ENDS),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", end_tokens=_QWEN_ENDS),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", layer_names=_ROUTER, has_experts=True, end_tokens=_QWEN_ENDS
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norms_hold_one=True,
        layer_names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        settings=gemma3_settings,
        end_tokens=("<end_of_turn>",),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        layer_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        end_tokens=_PHI3_ENDS,
    ),
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
# The weights that each product stacks, except those that an architecture splits first.
_STACKED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("o_proj",),
    ("down_proj",),
    ("embed_tokens",),
    ("lm_head",),
)
_EXPERT_NAMES = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_NUMBER = "(0|[1-9][0-9]{0,4})"
_LAYER_TENSOR = re.compile(rf"blk\.{_NUMBER}\.(\w+)\.(weight|bias)")
# All experts of a layer in one tensor; in files of 2023 one by one.
_EXPERT_TENSOR = re.compile(rf"blk\.{_NUMBER}\.(ffn_gate|ffn_up|ffn_down)(?:_exps|\.{_NUMBER})\.weight")
_ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_PIECE_ELEMENTS = 1 << 20


class GGUFCheckpoint:
    """One GGUF file, seen as a Hugging Face checkpoint."""

    def __init__(self, path: Path, keep_blocks: bool = False) -> None:
        """With ``keep_blocks`` weights are rows of raw bytes where ``weights/gguf_blocks`` supports their encoding."""
        self.path = path
        self._codec = BlockCodec()
        self._file = GGUFFile(path, self._codec.block_sizes)
        metadata = Metadata(self._file.metadata, path)
        self._architecture = self._find_architecture(metadata)
        self._num_experts = metadata.integer("expert_count", 0, low=0, high=MAX_EXPERTS)
        entries = {entry.name: entry for entry in self._file.tensors}
        factors = self._read_factors(entries.pop(_ROPE_FACTORS, None))
        named = {key: self._read_factors(entries.pop(name, None)) for key, name in _LONGROPE_FACTORS.items()}
        longrope = {key: values for key, values in named.items() if values is not None}
        self._entries = self._translate_all(entries.values())
        self._kept = self._find_kept() if keep_blocks else {}
        values: dict[str, Any] = {
            "architectures": [self._architecture.model_class],
            "model_type": self._architecture.model_type,
            "torch_dtype": self._codec.dtype_name(self._file.tensors),
            **model_config(metadata, {name: entry.shape for name, entry in self._entries.items()}, longrope),
            **(self._architecture.settings(metadata) if self._architecture.settings else {}),
        }
        if factors is not None:
            # Divisors of the inverse frequencies, which is how GGUF stores Llama 3's rope scaling.
            values["rope_freq_factors"] = factors
        if self._kept:
            types = {name.removesuffix(".weight"): kind for name, kind in self._kept.items()}
            values["quantization_config"] = {"quant_method": "gguf", "tensor_types": types}
        self.config = Fields(values, str(path))
        self._check_rotation()
        self.generation_config = Fields(generation_config(metadata, self._architecture.end_tokens), str(path))

    def tensor_headers(self) -> list[TensorHeader]:
        return [self._header(name, entry) for name, entry in self._entries.items()]

    def _header(self, name: str, entry: TensorEntry) -> TensorHeader:
        if name in self._kept:
            return TensorHeader(name, (entry.shape[0], entry.num_bytes // entry.shape[0]), torch.uint8)
        return TensorHeader(name, entry.shape, self._codec.dtype_of(entry))

    def tensor_names(self) -> list[str]:
        return list(self._entries)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, entry in self._entries.items():
            tensor = self._rows_of(entry) if name in self._kept else self._decode(entry)
            if self._architecture.rotary_rows_permuted and ".self_attn.q_proj." in name:
                tensor = self._unpermute(name, tensor, self.config["num_attention_heads"])
            elif self._architecture.rotary_rows_permuted and ".self_attn.k_proj." in name:
                tensor = self._unpermute(name, tensor, self.config["num_key_value_heads"])
            elif self._architecture.norms_hold_one and "norm" in name:
                tensor = tensor - 1
            yield name, tensor

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self._file.metadata, self.path)

    classifies = False

    def text_limit(self) -> int | None:
        return None

    def read_tensors(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return {}

    def dense_steps(self) -> list[DenseStep]:
        return []

    def pooling_defaults(self) -> PoolingDefaults:
        return pooling_defaults(Metadata(self._file.metadata, self.path))

    def _unpermute(self, name: str, tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
        head_dim = self.config["head_dim"]
        if tensor.shape[0] != num_heads * head_dim:
            raise ModelError(
                f"{self.path}: {name} has {tensor.shape[0]} rows, the metadata says {num_heads} heads of {head_dim}"
            )
        return unpermute_rotary_rows(tensor, num_heads)

    def _find_kept(self) -> dict[str, str]:
        """The encodings of weights that stay in blocks, by name: all that one product stacks, or none of them."""
        found = {}
        for name, entry in self._entries.items():
            kind = self._codec.type_name(entry)
            if name.endswith(".weight") and len(entry.shape) == 2 and is_kept(kind):
                found[name.removesuffix(".weight")] = kind
        kept = {}
        for name, kind in found.items():
            prefix, _, part = name.rpartition(".")
            stacked = next((parts for parts in _STACKED if part in parts), None)
            names = [".".join(filter(None, (prefix, other))) for other in stacked or ()]
            if stacked is not None and all(other in found for other in names):
                kept[f"{name}.weight"] = kind
        return kept

    def _rows_of(self, entry: TensorEntry) -> torch.Tensor:
        """[rows, bytes of a row], as in the file."""
        return torch.from_numpy(self._file.read(entry)).view(entry.shape[0], -1)

    def _decode(self, entry: TensorEntry) -> torch.Tensor:
        try:
            return self._codec.decode(self._file.raw(entry), entry)
        except UnreadableBlocks as error:
            raise ModelError(f"{self.path}: {error}; use another quantisation of this model") from error

    def _read_factors(self, entry: TensorEntry | None) -> list[float] | None:
        """Factors of rotary frequencies: one for each pair of a head's dimensions."""
        if entry is None:
            return None
        if math.prod(entry.shape) > MAX_HEADS:
            raise ModelError(f"{self.path}: {entry.name} has shape {list(entry.shape)}, which are no rotary factors")
        return self._decode(entry).flatten().tolist()

    def _translate_all(self, entries: Iterable[TensorEntry]) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for entry in entries:
            for name, part in self._translate(entry):
                if name in found:
                    raise ModelError(f"{self.path} holds {describe_value(name)} twice; download it again")
                found[name] = part
        return found

    def _find_architecture(self, metadata: Metadata) -> Architecture:
        if metadata.fields.integer("split.count", 1, low=0) > 1:
            raise ModelError(f"{self.path} is one of several parts; merge them first with llama-gguf-split --merge")
        if metadata.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{self.path} is of architecture {describe_value(metadata.architecture)}; "
                f"supported in GGUF files: {', '.join(ARCHITECTURES)}"
            )
        architecture = ARCHITECTURES[metadata.architecture]
        relatives = (relative for key, relative in architecture.relatives.items() if metadata.integer(key, 0, low=0))
        return next(relatives, architecture)

    def _check_rotation(self) -> None:
        if self._architecture.rotary_rows_permuted and self.config["partial_rotary_factor"] != 1.0:
            head_dim = self.config["head_dim"]
            rotated = round(head_dim * self.config["partial_rotary_factor"])
            raise ModelError(f"{self.path} rotates {rotated} of {head_dim} dimensions of a head; not supported")

    def _translate(self, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
        """Hugging Face's name of a tensor, or its names where it holds several of Hugging Face's tensors."""
        if self._architecture.has_experts and (match := _EXPERT_TENSOR.fullmatch(entry.name)):
            layer, kind, expert = match.groups()
            if expert is None and (len(entry.shape) != 3 or entry.shape[0] != self._num_experts):
                raise ModelError(
                    f"{self.path}: {entry.name} has shape {list(entry.shape)}, which holds no experts, or not the "
                    f"{self._num_experts} of the metadata"
                )
            prefix, name = f"model.layers.{layer}.mlp.experts.", f"{_EXPERT_NAMES[kind]}.weight"
            experts = _slices(entry) if expert is None else [(int(expert), entry)]
            yield from ((f"{prefix}{idx}.{name}", part) for idx, part in experts)
            return
        stem, _, suffix = entry.name.rpartition(".")
        if suffix in ("weight", "bias"):
            if stem in _MODEL_NAMES:
                yield f"{_MODEL_NAMES[stem]}.{suffix}", entry
                return
            names = {**_LAYER_NAMES, **self._architecture.layer_names}
            match = _LAYER_TENSOR.fullmatch(entry.name)
            if match and match[2] in names:
                yield f"model.layers.{match[1]}.{names[match[2]]}.{suffix}", entry
                return
        raise ModelError(
            f"{self.path} holds {describe_value(entry.name)}, which {self._architecture.model_class} does not have; "
            "not supported"
        )


def _slices(entry: TensorEntry) -> Iterator[tuple[int, TensorEntry]]:
    """The parts of a stacked tensor as separate tensors, so that they are decoded one by one."""
    num_parts = entry.shape[0]
    num_bytes = entry.num_bytes // num_parts
    for idx in range(num_parts):
        yield idx, replace(entry, shape=entry.shape[1:], offset=entry.offset + idx * num_bytes, num_bytes=num_bytes)


def unpermute_rotary_rows(
    weight: torch.Tensor,  # [num_heads * head_dim, ...], each head's rows as (pair, half)
    num_heads: int,
) -> torch.Tensor:  # the same shape, each head's rows as (half, pair)
    """Undo llama.cpp's reordering of q and k rows: neighbours (2i, 2i + 1) go back to (i, i + head_dim / 2)."""
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


class UnreadableBlocks(Exception):  # noqa: N818  describes the condition, like StopIteration
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
        # In pieces, because the package's working memory is twice the size.
        step = max(1, _PIECE_ELEMENTS // row_len)
        try:
            # Scales of a damaged file may be NaN; that shows in the logits, and numpy need not warn.
            with np.errstate(all="ignore"):
                for start in range(0, num_rows, step):
                    values[start : start + step] = self._dequantize(packed[start : start + step], kind)
        except NotImplementedError:
            raise UnreadableBlocks(f"{entry.name} is stored as {kind.name}, which cannot be read") from None
        return torch.from_numpy(values).reshape(entry.shape)

    def type_name(self, entry: TensorEntry) -> str:
        name: str = self._kinds(entry.type_id).name
        return name

    def dtype_of(self, entry: TensorEntry) -> torch.dtype:
        """The type that ``decode`` returns."""
        return self._plain.get(entry.type_id, torch.float32)

    def dtype_name(self, entries: list[TensorEntry]) -> str:
        """The type of most weights as ``decode`` returns them."""
        counts = {"float32": 0}
        for entry in entries:
            name = str(self.dtype_of(entry)).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + math.prod(entry.shape)
        return max(counts, key=lambda name: counts[name])
