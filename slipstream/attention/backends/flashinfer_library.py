"""The interface to FlashInfer and its implementation by the package. Signatures are those of 0.6.14.

The package is an optional extra, imported when ``FlashInferLibrary`` is created, never before.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.attention.backends.flashinfer_paths import NOT_INSTALLED, PACKAGE, Choice, Paths, is_installed
from slipstream.errors import ConfigError

_WORKSPACE_BYTES = 128 << 20  # as the library recommends
_CUDA_CORE_GROUPS = (1, 2, 3)  # query heads per key head; with more of them tensor cores are faster


class DecodeKeys(NamedTuple):
    """The keys of equally few query tokens a request."""

    block_table: Tensor  # [num_reqs, max_pages] int32
    key_lens: Tensor  # [num_reqs] int32, query tokens included
    mask: Tensor | None  # [num_reqs, query_len, 1] int32: bit j is key key_len - query_len + j; None: causal


class ContextKeys(NamedTuple):
    """The keys of any number of query tokens a request."""

    block_table: Tensor  # [num_reqs, max_pages] int32
    key_lens: Tensor  # [num_reqs] int32, query tokens included
    query_starts: Tensor  # [num_reqs + 1] int32
    page_starts: Tensor  # [num_reqs + 1] int32


class PassSizes(NamedTuple):
    max_query_len: int  # in a decode of every request
    max_seq_len: int
    scale: float
    window_left: int


class LayerShape(NamedTuple):
    """The key of a plan, shared by layers with equal values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window: int
    dtype: torch.dtype

    @property
    def window_left(self) -> int:
        return self.window - 1


class PlanPages(NamedTuple):
    """The inputs of a native plan: three host tensors, and the concatenated pages of all requests on the device."""

    query_starts: Tensor  # [num_reqs + 1] int32
    page_starts: Tensor  # [num_reqs + 1] int32
    last_page_lens: Tensor  # [num_reqs] int32
    page_ids: Tensor  # [page_starts[-1]] int32, device


class Planned(Protocol):
    def run(self, q: Tensor, kv_cache: Tensor, page_ids: tuple[Tensor, ...], out: Tensor) -> None:
        """Attend as planned. ``page_ids`` are those of the plan: only the device may read them."""
        ...


class Library(Protocol):
    """The calls to FlashInfer. Keys are stored as [num_pages, 2, num_kv_heads, page_size, head_dim] ("HND")."""

    def plan_decode(self, shape: LayerShape, pages: PlanPages) -> Planned:
        """One query token per request."""
        ...

    def plan_prefill(self, role: str, shape: LayerShape, pages: PlanPages) -> Planned:
        """Any number of query tokens, causal. A step creates at most one plan of each role and shape."""
        ...

    def plan_cascade(self, shape: LayerShape, levels: tuple[PlanPages, ...]) -> Planned:
        """The last level is causal, the levels before are visible to all tokens."""
        ...

    def trtllm_decode(
        self,
        q: Tensor,  # [num_reqs * query_len, num_heads, head_dim]
        kv_cache: Tensor,
        keys: DecodeKeys,
        out: Tensor,
        sizes: PassSizes,
    ) -> None: ...

    def trtllm_context(
        self,
        q: Tensor,
        kv_cache: Tensor,
        keys: ContextKeys,
        out: Tensor,
        sizes: PassSizes,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """A library wrapper, which holds its last plan. On a GPU a step's launches follow its plan immediately."""

    wrapper: Any
    options: dict[str, Any]

    def run(self, q: Tensor, kv_cache: Tensor, page_ids: tuple[Tensor, ...], out: Tensor) -> None:
        self.wrapper.run(q, kv_cache, out=out, **self.options)


@dataclass(frozen=True, slots=True)
class _CascadeWrapper:
    wrapper: Any

    def run(self, q: Tensor, kv_cache: Tensor, page_ids: tuple[Tensor, ...], out: Tensor) -> None:
        out.copy_(self.wrapper.run(q, kv_cache))


class FlashInferLibrary:
    """The package's functions, imported when this object is created.

    Its kernels run without programmatic dependent launch (``enable_pdl``): the engine's kernels rely on everything but
    their immediate predecessor being complete, which is not known of these kernels.
    """

    def __init__(self, paths: Paths, device: torch.device) -> None:
        if not is_installed():
            raise ConfigError(f"attention_backend flashinfer: {NOT_INSTALLED}")
        self._decode, self._prefill, self._cascade = (
            importlib.import_module(f"{PACKAGE}.{name}") for name in ("decode", "prefill", "cascade")
        )
        # The trtllm kernels keep counters at the start of their workspace: it must be zeroed, and used by them only.
        self._counted = self._memory(device, paths.prefill, paths.decode, of="trtllm")
        self._scratch = self._memory(device, paths.prefill, paths.decode, paths.cascade, of="native")
        self._wrappers: dict[tuple[str, LayerShape], Any] = {}

    @staticmethod
    def _memory(device: torch.device, *choices: Choice, of: str) -> Tensor:
        used = any((c.is_trtllm if of == "trtllm" else c.path == "native") for c in choices)
        return torch.zeros(_WORKSPACE_BYTES if used else 0, dtype=torch.uint8, device=device)

    def plan_decode(self, shape: LayerShape, pages: PlanPages) -> Planned:
        group = shape.num_heads // shape.num_kv_heads
        wrapper = self._wrappers.get(("decode", shape))
        if wrapper is None:
            make, with_cores = self._decode.BatchDecodeWithPagedKVCacheWrapper, group not in _CUDA_CORE_GROUPS
            wrapper = self._wrappers["decode", shape] = make(self._scratch, "HND", use_tensor_cores=with_cores)
        numbers = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        tables = (pages.page_starts, pages.page_ids, pages.last_page_lens)
        wrapper.plan(*tables, *numbers, **self._options(shape))
        return _Wrapper(wrapper, {"enable_pdl": False})

    def plan_prefill(self, role: str, shape: LayerShape, pages: PlanPages) -> Planned:
        wrapper = self._wrappers.get((role, shape))
        if wrapper is None:
            make = self._prefill.BatchPrefillWithPagedKVCacheWrapper
            wrapper = self._wrappers[role, shape] = make(self._scratch, "HND")
        numbers = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        tables = (pages.query_starts, pages.page_starts, pages.page_ids, pages.last_page_lens)
        wrapper.plan(*tables, *numbers, causal=True, **self._options(shape))
        return _Wrapper(wrapper, {"enable_pdl": False})

    def plan_cascade(self, shape: LayerShape, levels: tuple[PlanPages, ...]) -> Planned:
        wrapper = self._wrappers.get(("cascade", shape))
        if wrapper is None:
            make = self._cascade.MultiLevelCascadeAttentionWrapper
            wrapper = self._wrappers["cascade", shape] = make(len(levels), self._scratch, "HND")
        numbers = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        query_starts, page_starts, last_page_lens, page_ids = (list(column) for column in zip(*levels, strict=True))
        tables = (query_starts, page_starts, page_ids, last_page_lens)
        wrapper.plan(*tables, *numbers, causal=True, **self._options(shape))
        return _CascadeWrapper(wrapper)

    @staticmethod
    def _options(shape: LayerShape) -> dict[str, Any]:
        types = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
        return {"sm_scale": shape.scale, "window_left": shape.window_left, **types}

    def trtllm_decode(self, q: Tensor, kv_cache: Tensor, keys: DecodeKeys, out: Tensor, sizes: PassSizes) -> None:
        query_len, max_seq_len, scale, window_left = sizes
        options: dict[str, Any] = {"kv_layout": "HND", "q_len_per_req": query_len, "enable_pdl": False, "out": out}
        if keys.mask is not None:
            options["mask"] = keys.mask.view(torch.uint16)
        tables, scales = (keys.block_table, keys.key_lens, max_seq_len), (scale, 1.0, window_left)
        self._decode.trtllm_batch_decode_with_kv_cache(q, kv_cache, self._counted, *tables, *scales, **options)

    def trtllm_context(self, q: Tensor, kv_cache: Tensor, keys: ContextKeys, out: Tensor, sizes: PassSizes) -> None:
        self._prefill.trtllm_batch_context_with_kv_cache(
            q,
            kv_cache,
            self._counted,
            keys.block_table,
            keys.key_lens,
            sizes.max_query_len,
            sizes.max_seq_len,
            sizes.scale,
            1.0,
            keys.key_lens.shape[0],
            keys.query_starts,
            keys.page_starts,
            sizes.window_left,
            kv_layout="HND",
            enable_pdl=False,
            out=out,
        )
