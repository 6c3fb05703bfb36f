"""The caches of layers, which live from one step to the next. Plain data, from which memory is planned and grouped.

A kind of cache is a spec, a backend that works on its memory, and kernels. The spec says what one page and one request
row take in one layer; layers with equal specs form a group, which one backend serves (``attention/groups.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}


# Type of keys and values: the engine's, or a smaller one. Kernels read it from the cache's tensor.
KeyValueType = Literal["model", "float16", "bfloat16"]


class Shape(NamedTuple):
    """A tensor's shape in one page or row."""

    size: tuple[int, ...]
    # "model": the engine's type; "wide": float32 at least, for states that accumulate over a text; or a type.
    dtype: Literal["model", "wide", "float16", "bfloat16", "int64", "int32", "int8", "uint8"] = "model"

    def dtype_name(self, model_dtype: str) -> str:
        if self.dtype == "model":
            return model_dtype
        if self.dtype == "wide":
            return model_dtype if _BYTES[model_dtype] >= _BYTES["float32"] else "float32"
        return self.dtype

    def num_bytes(self, model_dtype: str) -> int:
        return math.prod(self.size) * _BYTES[self.dtype_name(model_dtype)]


class CacheSpec:
    """A frozen dataclass per kind. Equal specs form a group, so every difference between layers must be a field."""

    # Why cached pages are not enough to resume such a layer after a prefix; empty: they are.
    prefix_refusal: ClassVar[str] = ""

    # What the entries of a page belong to. Those of a request's encoder have a page table of their own.
    indexed_by: ClassVar[Literal["text", "encoder"]] = "text"

    # Why no draft model may have such layers, as the rest of a sentence after the model's name; empty: it may.
    drafter_refusal: ClassVar[str] = ""

    # Why a token's result with such a layer may depend on what is computed beside it, as the rest of a sentence after
    # "exact is not possible: "; empty: it does not, to the bit.
    exact_refusal: ClassVar[str] = "a kind of cache of this model does not say that it keeps it"

    # Why a prompt must be computed in one pass, and no step be cut within it; empty: it may come in chunks.
    whole_prompts: ClassVar[str] = ""

    def page_shapes(self, page_size: int) -> tuple[Shape, ...]:
        """The tensors of one page in one layer."""
        return ()

    def row_shapes(self, num_drafts: int) -> tuple[Shape, ...]:
        """The tensors of one request row in one layer, if a step verifies at most this many drafts."""
        return ()

    def with_keys_in(self, dtype: KeyValueType) -> CacheSpec:
        """The same with keys and values in that type; other kinds are unchanged."""
        return self

    def working_values(self) -> int:
        """Temporary values per token that the layer needs, beside heads and feed-forward."""
        return 0

    def open(self, setting: Any) -> Any:
        """The ``CacheBackend`` of a group of such layers; ``setting`` is an ``attention.groups.GroupSetting``."""
        raise TypeError(f"{type(self).__name__} has no backend of its own")


@dataclass(frozen=True)
class GroupedQuerySpec(CacheSpec):
    """Keys and values of grouped-query attention, the cache of most decoders.

    A page of one head is contiguous, which is what decode kernels read, and a page is addressed by bytes that only the
    element size changes, so that a cache of lower precision keeps page ids, tables and kernels' index arithmetic.
    """

    num_kv_heads: int
    head_dim: int
    dtype: KeyValueType = "model"

    exact_refusal: ClassVar[str] = ""

    def page_shapes(self, page_size: int) -> tuple[Shape, ...]:
        return (Shape((2, self.num_kv_heads, page_size, self.head_dim), self.dtype),)

    def with_keys_in(self, dtype: KeyValueType) -> GroupedQuerySpec:
        return replace(self, dtype=dtype)

    def open(self, setting: Any) -> Any:
        # The backend depends on the options and the machine.
        return setting.open_grouped_query(self, setting.memory)


@dataclass(frozen=True)
class TokenStates(CacheSpec):
    """A vector for each token, in its page: the state that one module of a draft head passes to the next."""

    size: int

    def page_shapes(self, page_size: int) -> tuple[Shape, ...]:
        return (Shape((page_size, self.size)),)


def memory_owners(specs: Sequence[CacheSpec]) -> list[int]:
    """Of each layer, the one whose memory it uses: mostly itself.

    A page belongs to a request's text or to the output of its encoder, never to both. So a layer that is indexed by the
    encoder uses the memory of a layer with equal pages that is indexed by the text, and another one each.
    """
    free = [idx for idx, spec in enumerate(specs) if spec.indexed_by == "text" and spec.page_shapes(1)]
    owners = []
    for idx, spec in enumerate(specs):
        owner, shapes = idx, (spec.page_shapes(1), spec.row_shapes(0))
        if spec.indexed_by == "encoder":
            owner = next((i for i in free if (specs[i].page_shapes(1), specs[i].row_shapes(0)) == shapes), idx)
            free = [i for i in free if i != owner]
        owners.append(owner)
    return owners


def page_bytes(specs: Iterable[CacheSpec], page_size: int, dtype: str) -> int:
    """Memory of one page in all layers."""
    all_specs = list(specs)
    owners = memory_owners(all_specs)
    own = [spec for idx, spec in enumerate(all_specs) if owners[idx] == idx]
    return sum(shape.num_bytes(dtype) for spec in own for shape in spec.page_shapes(page_size))


def row_bytes(specs: Iterable[CacheSpec], num_drafts: int, dtype: str) -> int:
    """Memory of one request row in all layers."""
    return sum(shape.num_bytes(dtype) for spec in specs for shape in spec.row_shapes(num_drafts))
