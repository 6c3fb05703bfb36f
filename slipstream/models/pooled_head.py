"""Dense layers after pooling: a classifier's, or those that sentence-transformers puts after its pooling.

They are small and applied once to a text, so they are computed in float32 whatever the model's type is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.sentence_transformers import DenseStep
from slipstream.errors import ModelError
from slipstream.fields import Fields
from slipstream.kernels.step.dense_step import ACTIVATIONS, dense_step
from slipstream.pooling import Activation, Scoring
from slipstream.text.pair_template import answer_ids
from slipstream.text.tokenizer import Tokenizer
from slipstream.values import describe_value

_USUAL: dict[bool, Activation] = {True: "sigmoid", False: "softmax"}  # by whether there is one label
ReadTensors = Callable[[Sequence[str]], Mapping[str, Tensor]]


class PooledHead:
    """The layers in order."""

    def __init__(self, steps: Sequence[DenseStep]) -> None:
        self._steps = list(steps)
        self.out_size = self._steps[-1].weight.shape[0]

    def to(self, device: torch.device, dtype: torch.dtype) -> PooledHead:
        """``dtype`` is the model's."""
        wide = torch.promote_types(dtype, torch.float32)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(wide).to(device).contiguous()

        return PooledHead(
            [DenseStep(move(w), None if b is None else move(b), activation) for w, b, activation in self._steps]
        )

    def project(self, vectors: Tensor) -> Tensor:
        """[n, hidden size] -> [n, out_size], both in float32 at least."""
        for step in self._steps:
            vectors = dense_step(vectors, *step)
        return vectors


class Classifier(NamedTuple):
    """Where an architecture keeps its classifier: dense layers by name with the activation after each."""

    steps: Sequence[tuple[str, str]]
    pooling: str  # which hidden states it is applied to

    def open(self, read: ReadTensors, hidden_size: int, source: str) -> PooledHead:
        """``read`` gives those of the named tensors that the checkpoint has."""
        tensors = read([f"{name}.{part}" for name, _ in self.steps for part in ("weight", "bias")])
        steps = []
        for name, activation in self.steps:
            if (weight := tensors.get(f"{name}.weight")) is None:
                raise ModelError(f"{source} lacks {name}.weight, which its classifier needs; download it again")
            steps.append(DenseStep(weight, tensors.get(f"{name}.bias"), activation))
        check_sizes(steps, hidden_size, source)
        return PooledHead(steps)


def open_pooled_head(
    checkpoint: Checkpoint, classifier: Classifier | None, hidden_size: int
) -> tuple[PooledHead | None, Scoring | None]:
    """The dense layers of a checkpoint, and how it scores if they are a classifier's."""
    source = str(checkpoint.path)
    if checkpoint.classifies and classifier is not None:
        head = classifier.open(checkpoint.read_tensors, hidden_size, source)
        return head, read_scoring(checkpoint.config, classifier.pooling, head.out_size)
    if steps := checkpoint.dense_steps():
        check_sizes(steps, hidden_size, source)
        return PooledHead(steps), None
    return None, None


def open_pair_judge(model: Generator, tokenizer: Tokenizer) -> tuple[PooledHead | None, Scoring | None]:
    """Pairs are scored by a model that generates: by how much likelier "yes" is than "no" as its next token."""
    if (ids := answer_ids(tokenizer)) is None:
        return None, None
    rows = model.output_rows(torch.tensor(ids, dtype=torch.int32, device=model.device))
    if rows is None:
        return None, None
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    # The first of two probabilities is the sigmoid of the difference of their logits.
    return PooledHead([DenseStep(wide[:1] - wide[1:], None)]), Scoring(
        "last", ("yes",), "sigmoid", is_pair_template=True
    )


class Generator(Protocol):
    """What is needed of a model that generates."""

    @property
    def device(self) -> torch.device: ...

    def output_rows(self, token_ids: Tensor) -> Tensor | None: ...


def check_sizes(steps: Sequence[DenseStep], hidden_size: int, source: str) -> None:
    size = hidden_size
    for weight, bias, activation in steps:
        if weight.ndim != 2 or weight.shape[1] != size or (bias is not None and bias.shape != weight.shape[:1]):
            raise ModelError(f"{source} has a dense layer of shape {list(weight.shape)} after {size} numbers")
        if activation not in ACTIVATIONS:
            raise ModelError(f"{source} has a dense layer with activation {describe_value(activation)}: not supported")
        size = weight.shape[0]


def read_scoring(fields: Fields, pooling: str, num_labels: int) -> Scoring:
    """Names of the labels, and how scores become probabilities, as a classifier's config says."""
    names, activation = fields.section("id2label"), _USUAL[num_labels == 1]
    if fields.has("problem_type"):
        kinds: dict[str, Activation] = {
            "regression": "",
            "single_label_classification": activation,
            "multi_label_classification": "sigmoid",
        }
        kind = fields.text("problem_type")
        if kind not in kinds:
            raise fields.refuse("problem_type", " or ".join(kinds))
        activation = kinds[kind]
    own = _own_activation(fields)
    labels = tuple(str(names.get(str(idx), f"LABEL_{idx}")) for idx in range(num_labels))
    return Scoring(pooling, labels, activation if own is None else own)


def _own_activation(fields: Fields) -> Activation | None:
    """The activation that a cross-encoder of sentence-transformers was saved with, by the name of its class."""
    known: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "", "Softmax": "softmax"}
    older = fields.text("sbert_ce_default_activation_function", "")
    name = fields.section("sentence_transformers").text("activation_fn", older)
    return known.get(name.rpartition(".")[2])
