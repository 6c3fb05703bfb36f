"""How a text becomes one vector, as users and checkpoints say it. Plain data: no torch, and nothing of steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from slipstream.errors import RequestError, nearest
from slipstream.values import MAX_INT32, Bounds, describe_value, read_number

_DIMENSIONS = Bounds(1, MAX_INT32, is_integer=True)


class PoolingKind(enum.IntEnum):
    """Which hidden states make the vector. The number is what the request's row holds on the device; 0 is none."""

    LAST = 1
    CLS = 2
    MEAN = 3


KIND_NAMES = tuple(kind.name.lower() for kind in PoolingKind)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """One request's. What is None is taken from the checkpoint."""

    pooling: str | None = None
    normalize: bool | None = None  # divide the vector by its length
    dimensions: int | None = None  # keep so many of the vector's first numbers, before it is normalised

    def __post_init__(self) -> None:
        if self.pooling is not None and (not isinstance(self.pooling, str) or self.pooling not in KIND_NAMES):
            hint = nearest(self.pooling, KIND_NAMES) if isinstance(self.pooling, str) else ""
            raise RequestError(
                f"pooling must be {', '.join(KIND_NAMES[:-1])} or {KIND_NAMES[-1]}, "
                f"not {describe_value(self.pooling)}{hint}"
            )
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
class PoolingDefaults:
    """What a checkpoint says of how its vectors are made; without a word, what most decoders do."""

    pooling: str = "last"
    normalize: bool = True
    refusal: str = ""  # why the engine cannot do as the checkpoint says
    is_all: bool = False  # the checkpoint has no weights for logits: vectors are all there is

    def fill(self, params: PoolingParams, hidden_size: int) -> PoolingParams:
        """The parameters with nothing left open; raises RequestError where the model cannot do what they ask."""
        if params.pooling is None and self.refusal:
            raise RequestError(f"{self.refusal}; choose pooling {', '.join(KIND_NAMES[:-1])} or {KIND_NAMES[-1]}")
        if params.dimensions is not None and params.dimensions > hidden_size:
            raise RequestError(f"dimensions {params.dimensions} is above the {hidden_size} of this model's vectors")
        pooling = self.pooling if params.pooling is None else params.pooling
        return replace(
            params, pooling=pooling, normalize=self.normalize if params.normalize is None else params.normalize
        )


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
        """What the caller gets: shortened, then normalised, if that was asked for."""
        values = self._values()[: params.dimensions].copy()
        if params.normalize:
            # Lengths are summed in float64, so that no square is lost or overflows.
            length = float(np.linalg.norm(values.astype(np.float64)))
            values /= max(length, float(np.finfo(values.dtype).tiny))
        return values

    def _values(self) -> npt.NDArray[np.floating]:
        found: npt.NDArray[np.floating] = np.frombuffer(self.data, dtype=self.dtype)
        return found
