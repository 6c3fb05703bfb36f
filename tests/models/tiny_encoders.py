"""Tiny random encoders, written by ``transformers``, with a tokenizer that puts special tokens around texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

VOCAB_SIZE, HIDDEN_SIZE = 280, 48
_CLS, _SEP, _PAD = 260, 261, 262
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
VARIANTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "bert": (BertConfig, BertModel, {}),
    "bert-tanh": (BertConfig, BertModel, {"hidden_act": "gelu_new", "type_vocab_size": 1}),
    "bert-classifier": (BertConfig, BertForSequenceClassification, {"num_labels": 3}),
    "bert-cross-encoder": (BertConfig, BertForSequenceClassification, {"num_labels": 1}),
    "roberta": (RobertaConfig, RobertaModel, {"type_vocab_size": 1}),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, {"type_vocab_size": 1}),
    "xlm-roberta-cross-encoder": (
        XLMRobertaConfig,
        XLMRobertaForSequenceClassification,
        {"num_labels": 1, "type_vocab_size": 1},
    ),
    "mpnet": (MPNetConfig, MPNetModel, {}),
    "mpnet-classifier": (MPNetConfig, MPNetForSequenceClassification, {"num_labels": 2}),
}


def build(variant: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of the variant with every parameter random, norms and biases included."""
    config_class, model_class, differences = VARIANTS[variant]
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config_class(**{**_SHAPE, **differences, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "LayerNorm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token for each byte, and BERT's special tokens around one text or a pair."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: 3 + i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<pad-0>", "[CLS]", "[SEP]", "[PAD]"])
    cls, sep = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]", '
        '"pad_token": "[PAD]", "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}'
    )
