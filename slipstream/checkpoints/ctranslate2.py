"""CTranslate2 checkpoints of Whisper, as faster-whisper has them, seen as Hugging Face's.

A folder has ``model.bin``, ``config.json`` and ``tokenizer.json``. Sizes are in the shapes of the variables. Products
of attention that share their input are stored as one; integer weights are divided by the scales stored beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoints.ctranslate2_file import CTranslate2File, Variable
from slipstream.checkpoints.sentence_transformers import DenseStep
from slipstream.checkpoints.tensor_header import TensorHeader
from slipstream.errors import ModelError
from slipstream.fields import Fields, read_json
from slipstream.pooling import PoolingDefaults
from slipstream.text.tokenizer import Tokenizer
from slipstream.values import describe_value

MODEL_FILE = "model.bin"
_SPEC = "WhisperSpec"
_EXACT_GELU = 3
_SCALE = "_scale"

_NORM_PARTS = {"gamma": "weight", "beta": "bias"}
# Hugging Face's names of the equal parts of a product, in the order of its rows.
_SELF_ATTENTION = {"linear_0": ("q_proj", "k_proj", "v_proj"), "linear_1": ("out_proj",)}
_CROSS_ATTENTION = {"linear_0": ("q_proj",), "linear_1": ("k_proj", "v_proj"), "linear_2": ("out_proj",)}
_BLOCKS: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "self_attention": ("self_attn.", "self_attn_layer_norm", _SELF_ATTENTION),
    "attention": ("encoder_attn.", "encoder_attn_layer_norm", _CROSS_ATTENTION),
    "ffn": ("", "final_layer_norm", {"linear_0": ("fc1",), "linear_1": ("fc2",)}),
}
_STACK_TENSOR = re.compile(r"(encoder|decoder)/(conv1|conv2|layer_norm)/(weight|bias|gamma|beta)")
_LAYER_TENSOR = re.compile(
    r"(encoder|decoder)/layer_(0|[1-9][0-9]{0,3})/(self_attention|attention|ffn)/(layer_norm|linear_[0-2])/"
    r"(weight|bias|gamma|beta)"
)
_WHOLE_NAMES = {
    "encoder/position_encodings/encodings": "model.encoder.embed_positions.weight",
    "decoder/position_encodings/encodings": "model.decoder.embed_positions.weight",
    "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
    "decoder/projection/weight": "proj_out.weight",
}
# Rows of keys' biases, which Hugging Face's model does not have; they are zeros.
_DROPPED = "k_proj.bias"


class _Part(NamedTuple):
    """One of Hugging Face's tensors: rows of a variable, one of ``num_parts`` equal parts."""

    name: str
    variable: Variable
    idx: int = 0
    num_parts: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.variable.shape[0] // self.num_parts, *self.variable.shape[1:])


class CTranslate2Checkpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = CTranslate2File(path / MODEL_FILE)
        if self._file.spec != _SPEC:
            raise self._refuse(f"holds a {describe_value(self._file.spec)}; only Whisper's are supported")
        if self._file.number("decoder/activation", _EXACT_GELU) != _EXACT_GELU:
            raise self._refuse("has another activation than Whisper's; not supported")
        self._parts = [part for variable in self._file.variables.values() for part in self._translate(variable)]
        own = read_json(path / "config.json")
        self._tokenizer = Tokenizer.from_folder(path)
        self.config = Fields(self._read_config(), str(path / MODEL_FILE))
        end_id = self._tokenizer.token_id("<|endoftext|>")
        self.generation_config = Fields(
            {
                "do_sample": False,
                "suppress_tokens": own.integers("suppress_ids"),
                "begin_suppress_tokens": own.integers("suppress_ids_begin"),
                **({} if end_id is None else {"eos_token_id": end_id}),
                **({"alignment_heads": own["alignment_heads"]} if own.has("alignment_heads") else {}),
            },
            str(path / "config.json"),
        )

    def tensor_headers(self) -> list[TensorHeader]:
        return [TensorHeader(part.name, part.shape, _read_dtype(part.variable)) for part in self._parts]

    def tensor_names(self) -> list[str]:
        return [part.name for part in self._parts]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        name, whole = "", torch.empty(0)
        for part in self._parts:
            if part.variable.name != name:  # the parts of a variable follow each other
                name, whole = part.variable.name, self._read(part.variable)
            yield part.name, whole.chunk(part.num_parts)[part.idx].clone() if part.num_parts > 1 else whole

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def classifies(self) -> bool:
        return False

    def text_limit(self) -> int | None:
        return None

    def read_tensors(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        return {}

    def dense_steps(self) -> list[DenseStep]:
        return []

    def pooling_defaults(self) -> PoolingDefaults:
        return PoolingDefaults()

    def _refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self._file.path} {reason}")

    def _read(self, variable: Variable) -> Tensor:
        """Its numbers; integers divided by their scales."""
        stored = self._file.tensor(variable.name)
        if stored.is_floating_point():
            return stored
        scale = self._file.tensor(variable.name + _SCALE)
        return stored.float() / scale.reshape(-1, *[1] * (stored.dim() - 1) if scale.numel() > 1 else [1])

    def _translate(self, variable: Variable) -> Iterator[_Part]:
        """Hugging Face's tensors in a variable; none where it is a setting, a scale or an alias."""
        name = variable.name
        if not variable.shape or name.endswith(_SCALE) or self._is_tied(variable):
            return
        if not variable.dtype.is_floating_point:
            self._check_scales(variable)
        if name in _WHOLE_NAMES:
            yield _Part(_WHOLE_NAMES[name], variable)
        elif match := _STACK_TENSOR.fullmatch(name):
            stack, module, part = match.groups()
            yield _Part(f"model.{stack}.{module}.{_NORM_PARTS.get(part, part)}", variable)
        elif match := _LAYER_TENSOR.fullmatch(name):
            yield from self._translate_layer(variable, *match.groups())
        elif name != "decoder/alignment_heads":
            raise self._refuse(f"holds {describe_value(name)}, which Whisper does not have; not supported")

    def _translate_layer(
        self, variable: Variable, stack: str, layer: str, block: str, module: str, part: str
    ) -> Iterator[_Part]:
        prefix, norm, products = _BLOCKS[block]
        before = f"model.{stack}.layers.{layer}."
        if module == "layer_norm":
            yield _Part(f"{before}{norm}.{_NORM_PARTS.get(part, part)}", variable)
            return
        names = products.get(module, ())
        if not names or variable.shape[0] % len(names):
            raise self._refuse(f"holds {variable.name} of shape {list(variable.shape)}, which does not fit")
        for idx, name in enumerate(names):
            if f"{name}.{part}" != _DROPPED:
                yield _Part(f"{before}{prefix}{name}.{part}", variable, idx, len(names))

    def _is_tied(self, variable: Variable) -> bool:
        embedding = self._file.variables.get("decoder/embeddings/weight")
        return variable.name == "decoder/projection/weight" and variable.offset == getattr(embedding, "offset", None)

    def _check_scales(self, variable: Variable) -> None:
        scale = self._file.variables.get(variable.name + _SCALE)
        if scale is None or scale.shape not in ((), (1,), variable.shape[:1]) or not scale.dtype.is_floating_point:
            raise self._refuse(f"holds {variable.name} in integers without usable scales; convert it again")

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        variable = self._file.variables.get(name)
        if variable is None or len(variable.shape) != rank:
            raise self._refuse(f"lacks {name}, or it has no {rank} dimensions; convert the model again")
        return variable.shape

    def _num_layers(self, stack: str) -> int:
        names = self._file.variables
        return next(idx for idx in range(len(names) + 1) if f"{stack}/layer_{idx}/ffn/linear_0/weight" not in names)

    def _read_config(self) -> dict[str, Any]:
        vocab_size, hidden_size = self._shape("decoder/embeddings/weight", 2)
        conv = self._shape("encoder/conv1/weight", 3)
        config = {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "is_encoder_decoder": True,
            "activation_function": "gelu",
            "d_model": hidden_size,
            "vocab_size": vocab_size,
            "num_mel_bins": conv[1],
            "max_source_positions": self._shape("encoder/position_encodings/encodings", 2)[0],
            "max_target_positions": self._shape("decoder/position_encodings/encodings", 2)[0],
            "scale_embedding": bool(self._file.number("decoder/scale_embeddings", 0)),
            "tie_word_embeddings": all(part.name != "proj_out.weight" for part in self._parts),
            "torch_dtype": str(_read_dtype(self._file.variables["decoder/embeddings/weight"])).removeprefix("torch."),
        }
        for stack in ("encoder", "decoder"):
            config[f"{stack}_layers"] = num_layers = self._num_layers(stack)
            if not num_layers:
                raise self._refuse(f"holds no layers of its {stack}; convert the model again")
            config[f"{stack}_attention_heads"] = self._file.number(f"{stack}/num_heads")
            config[f"{stack}_ffn_dim"] = self._shape(f"{stack}/layer_0/ffn/linear_0/weight", 2)[0]
        return config | self._special_ids()

    def _special_ids(self) -> dict[str, int]:
        end, start = self._tokenizer.token_id("<|endoftext|>"), self._tokenizer.token_id("<|startoftranscript|>")
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
        return {key: token_id for key, token_id in ids.items() if token_id is not None}


def _read_dtype(variable: Variable) -> torch.dtype:
    """The type of its numbers once they are read."""
    return variable.dtype if variable.dtype.is_floating_point else torch.float32
