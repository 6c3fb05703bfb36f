"""MPNet: BERT with a bias on scores that depends on distances, shared by all layers, and without types of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from slipstream.checkpoints.hf_config import MAX_VOCAB
from slipstream.config import ModelConfig
from slipstream.encoder_config import EncoderConfig
from slipstream.fields import Fields
from slipstream.models.bert import EMBEDDINGS, FEED_FORWARD
from slipstream.models.encoder import Encoder, read_encoder_config
from slipstream.models.pooled_head import Classifier

_LAYER = r"encoder\.layer\.(\d+)\."
_ENDS = r"\.(weight|bias)"
_PARTS = {"q": "query", "k": "key", "v": "value", "o": "output"}
_MAX_DISTANCE = 128  # no config says it


class MPNet(Encoder):
    renamed: ClassVar[Mapping[str, str]] = {
        **EMBEDDINGS,
        **{
            rf"{_LAYER}attention\.attn\.{part}{_ENDS}": rf"layers.\1.attention.{own}.\2" for part, own in _PARTS.items()
        },
        rf"{_LAYER}attention\.LayerNorm{_ENDS}": r"layers.\1.attention.norm.\2",
        **FEED_FORWARD,
        r"encoder\.relative_attention_bias\.weight": "distances.weight",
    }
    classifier = Classifier((("classifier.dense", "tanh"), ("classifier.out_proj", "")), "cls")

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf)
        num_buckets = fields.integer("relative_attention_num_buckets", 32, low=4, high=1 << 16)
        first = 1 + fields.integer("pad_token_id", 1, low=0, high=MAX_VOCAB)
        own = EncoderConfig(0, first, num_buckets, _MAX_DISTANCE, prefix="mpnet.")
        return read_encoder_config(fields, own)
