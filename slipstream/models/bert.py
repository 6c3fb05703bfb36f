"""BERT, which MiniLM and BGE are, and RoBERTa and XLM-RoBERTa, whose positions are counted otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from slipstream.checkpoints.hf_config import MAX_VOCAB
from slipstream.config import ModelConfig
from slipstream.encoder_config import EncoderConfig
from slipstream.fields import Fields
from slipstream.models.encoder import Encoder, read_encoder_config
from slipstream.models.pooled_head import Classifier

_LAYER = r"encoder\.layer\.(\d+)\."
_ENDS = r"\.(weight|bias)"
EMBEDDINGS = {
    r"embeddings\.word_embeddings\.weight": "words.weight",
    r"embeddings\.position_embeddings\.weight": "places.weight",
    rf"embeddings\.LayerNorm{_ENDS}": r"norm.\1",
}
FEED_FORWARD = {
    rf"{_LAYER}intermediate\.dense{_ENDS}": r"layers.\1.mlp.up.\2",
    rf"{_LAYER}output\.dense{_ENDS}": r"layers.\1.mlp.down.\2",
    rf"{_LAYER}output\.LayerNorm{_ENDS}": r"layers.\1.mlp.norm.\2",
}


class Bert(Encoder):
    renamed: ClassVar[Mapping[str, str]] = {
        **EMBEDDINGS,
        r"embeddings\.token_type_embeddings\.weight": "types.weight",
        rf"{_LAYER}attention\.self\.(query|key|value){_ENDS}": r"layers.\1.attention.\2.\3",
        rf"{_LAYER}attention\.output\.dense{_ENDS}": r"layers.\1.attention.output.\2",
        rf"{_LAYER}attention\.output\.LayerNorm{_ENDS}": r"layers.\1.attention.norm.\2",
        **FEED_FORWARD,
    }
    classifier = Classifier((("bert.pooler.dense", "tanh"), ("classifier", "")), "cls")

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf)
        return read_encoder_config(fields, EncoderConfig(num_token_types=_num_types(fields, 2), prefix="bert."))


class Roberta(Encoder):
    """A text's positions begin after that of padding."""

    renamed: ClassVar[Mapping[str, str]] = Bert.renamed
    classifier = Classifier((("classifier.dense", "tanh"), ("classifier.out_proj", "")), "cls")

    @staticmethod
    def read_config(hf: dict[str, Any]) -> ModelConfig:
        fields = Fields.from_dict(hf)
        first = 1 + fields.integer("pad_token_id", 1, low=0, high=MAX_VOCAB)
        own = EncoderConfig(num_token_types=_num_types(fields, 1), first_position=first, prefix="roberta.")
        return read_encoder_config(fields, own)


def _num_types(fields: Fields, usual: int) -> int:
    return fields.integer("type_vocab_size", usual, high=MAX_VOCAB)
