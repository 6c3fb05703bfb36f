"""How a text becomes a vector or scores, as users and checkpoints say it. Plain data: no torch, nothing of steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from slipstream.errors import RequestError, nearest
from slipstream.values import MAX_INT32, Bounds, describe_value, read_number

_DIMENSIONS = Bounds(1, MAX_INT32, is_integer=True)
Activation = Literal["", "sigmoid", "softmax"]


class PoolingKind(enum.IntEnum):
    """Which hidden states make the vector. The number is what the request's row holds on the device; 0 is none."""

    LAST = 1
    CLS = 2
    MEAN = 3
    MAX = 4
    MEAN_SQRT_LEN = 5  # the sum divided by the root of the number of tokens
    WEIGHTED_MEAN = 6  # a token weighs as much as its number, counted from 1


KIND_NAMES = tuple(kind.name.lower() for kind in PoolingKind)


def name_kinds() -> str:
    return f"{', '.join(KIND_NAMES[:-1])} or {KIND_NAMES[-1]}"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """One request's. What is None is taken from the checkpoint."""

    pooling: str | None = None
    normalize: bool | None = None  # divide the vector by its length
    dimensions: int | None = None  # keep so many of the vector's first numbers, before it is normalised
    # Filled in by ``PoolingDefaults``.
    uses_head: bool = False  # the result is what the checkpoint's dense layers make of the pooled state
    activation: Activation = ""  # of scores

    def __post_init__(self) -> None:
        if self.pooling is not None and (not isinstance(self.pooling, str) or self.pooling not in KIND_NAMES):
            hint = nearest(self.pooling, KIND_NAMES) if isinstance(self.pooling, str) else ""
            raise RequestError(f"pooling must be {name_kinds()}, not {describe_value(self.pooling)}{hint}")
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise RequestError(f"normalize must be true or false, not {describe_value(self.normalize)}")
        object.__setattr__(self, "dimensions", read_number("dimensions", self.dimensions, _DIMENSIONS))

    @property
    def kind(self) -> PoolingKind:
        """Of a request whose defaults are filled in."""
        assert self.pooling is not None
        return PoolingKind[self.pooling.upper()]

    @property
    def needs_every_position(self) -> bool:
        """Whether more hidden states are read than the last one, which is computed in any case."""
        return self.kind is not PoolingKind.LAST


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a checkpoint scores or classifies texts."""

    pooling: str  # which hidden states its dense layers are applied to
    labels: tuple[str, ...]  # a name for each score
    activation: Activation = ""
    is_pair_template: bool = False  # pairs are judged by a prompt that asks for yes or no


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """What a checkpoint says of how its vectors are made; without a word, what most decoders do."""

    pooling: str = "last"
    normalize: bool = True
    refusal: str = ""  # why the engine cannot do as the checkpoint says
    is_all: bool = False  # the checkpoint has no weights for logits: vectors are all there is
    is_stated: bool = False  # by its files, or these are what is usual
    size: int = 0  # of vectors, where dense layers change it
    is_matryoshka: bool = False  # its vectors may be shortened
    shortened_to: tuple[int, ...] = ()  # to these sizes; empty: to any
    prompts: tuple[tuple[str, str], ...] = ()  # what is put before a text, by name
    default_prompt: str | None = None  # the name of the one that is used where none is asked for
    scoring: Scoring | None = None

    def of_encoder(self) -> PoolingDefaults:
        """The same for a model that only encodes; without a word all states of such a one count alike."""
        return replace(self, is_all=True, pooling=self.pooling if self.is_stated else "mean")

    def fill(self, params: PoolingParams, hidden_size: int) -> PoolingParams:
        """The parameters with nothing left open; raises RequestError where the model cannot do what they ask."""
        if self.scoring is not None and not self.scoring.is_pair_template:
            raise RequestError("this checkpoint scores texts and makes no vectors; call score, rerank or classify")
        if params.pooling is None and self.refusal:
            raise RequestError(f"{self.refusal}; choose pooling {name_kinds()}")
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, self.size or hidden_size)
        pooling = self.pooling if params.pooling is None else params.pooling
        normalize = self.normalize if params.normalize is None else params.normalize
        return replace(params, pooling=pooling, normalize=normalize, uses_head=self.size > 0)

    def _check_dimensions(self, asked: int, size: int) -> None:
        if asked > size:
            raise RequestError(f"dimensions {asked} is above the {size} of this model's vectors")
        if not self.is_matryoshka:
            raise RequestError(
                "this model is not declared as one whose vectors may be shortened, so dimensions cannot be given; "
                "if it was trained for it, say is_matryoshka in its config.json"
            )
        if self.shortened_to and asked not in self.shortened_to:
            raise RequestError(f"dimensions must be one of {', '.join(map(str, self.shortened_to))}, not {asked}")

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the checkpoint's classifier; raises RequestError where it has none."""
        if self.scoring is None or self.scoring.is_pair_template:
            raise RequestError("this checkpoint has no classifier; call embed, or score")
        return self.scoring.labels

    def fill_scores(self) -> PoolingParams:
        """The parameters of a text or a pair that is scored."""
        if (scoring := self.scoring) is None:
            raise RequestError("this checkpoint has no classifier and no template to judge pairs with; call embed")
        return PoolingParams(scoring.pooling, False, uses_head=True, activation=scoring.activation)

    def prompt_of(self, name: str | None) -> str:
        """What is put before a text."""
        if name is None:
            name = self.default_prompt
        if name is None:
            return ""
        known = dict(self.prompts)
        if name not in known:
            named = f"known: {', '.join(known)}" if known else "the checkpoint has none"
            raise RequestError(f"there is no prompt {describe_value(name)}{nearest(name, known)} ({named})")
        return known[name]


VectorType = Literal["float32", "float64"]


@dataclass(frozen=True, slots=True)
class PooledVector:
    """The numbers of one text as the device computed them: bytes, which travel between processes as they are."""

    data: bytes
    dtype: VectorType = "float32"

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self._values()).all())

    def finish(self, params: PoolingParams) -> npt.NDArray[np.floating]:
        """What the caller gets: shortened, then normalised, if that was asked for; or scores as probabilities."""
        values = self._values()[: params.dimensions].copy()
        if params.normalize:
            # Lengths are summed in float64, so that no square is lost or overflows.
            length = float(np.linalg.norm(values.astype(np.float64)))
            values /= max(length, float(np.finfo(values.dtype).tiny))
        if params.activation == "sigmoid":
            values = (0.5 * (1.0 + np.tanh(0.5 * values.astype(np.float64)))).astype(values.dtype)
        elif params.activation == "softmax":
            powers = np.exp(values.astype(np.float64) - values.max())
            values = (powers / powers.sum()).astype(values.dtype)
        return values

    def _values(self) -> npt.NDArray[np.floating]:
        found: npt.NDArray[np.floating] = np.frombuffer(self.data, dtype=self.dtype)
        return found
