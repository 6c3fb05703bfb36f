"""Which of FlashInfer's kernels serve a model on a machine, and what metadata a batch needs for them.

Pure decisions: imports neither torch nor FlashInfer. Statements about the library hold for 0.6.14.

Prefill and decode are chosen separately, and each may use its own path:

native   plans on the host: page counts and exact lengths go into a work list, which is staged through one pinned buffer
         that the next plan overwrites. A plan is therefore made only while no other step is in flight.
trtllm   reads lengths and page tables on the device. Needs sm_100 or sm_103.
xqa      the kernel of the trtllm decode entry on sm_90: the same properties, but its own way to mask drafts.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal, NamedTuple

from slipstream.errors import ConfigError

PathName = Literal["native", "trtllm", "xqa", "none"]
GraphSupport = Literal["never", "decode", "always"]
HostLengths = Literal["none", "bound", "exact"]
ExactLengths = Literal["never", "prefill", "always"]

PACKAGE = "flashinfer"
NOT_INSTALLED = "FlashInfer is not installed; pip install 'slipstream[flashinfer]'"
DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128, 256)
_TRTLLM_PAGE_SIZES = (16, 32, 64)
_XQA_PAGE_SIZES = (16, 32, 64, 128)
_MAX_XQA_GROUP = 32  # query heads per key head: rows of one tile
MAX_XQA_QUERY = 32  # bits of the one word of a query's mask


class HeadShape(NamedTuple):
    """The properties that kernels are compiled for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str


class Features(NamedTuple):
    """The requirements of a model and its engine."""

    query_len: int = 1  # maximum tokens of a decoding request: its last one and its drafts
    window: int = 0  # of any layer; 0: none
    cascade: bool = False
    context_parallel: bool = False
    seq_starts: bool = False  # a drafter with its own keys, which may have gaps


class Choice(NamedTuple):
    """A path and the reason for it."""

    path: PathName
    reason: str

    @property
    def is_trtllm(self) -> bool:
        return self.path in ("trtllm", "xqa")

    @property
    def host_lengths(self) -> HostLengths:
        return "exact" if self.path == "native" else "none"


@dataclass(frozen=True, slots=True)
class Paths:
    prefill: Choice
    decode: Choice
    cascade: Choice  # for batches with a common prefix; "none": cascade is not used
    context_parallel: bool = False

    @property
    def problem(self) -> str | None:
        """Why FlashInfer cannot be used; None if it can."""
        return next((c.reason for c in (self.prefill, self.decode) if c.path == "none"), None)

    @property
    def host_lengths(self) -> HostLengths:
        return "none" if self.exact_lengths == "never" else "exact"

    @property
    def exact_lengths(self) -> ExactLengths:
        """Which batches must be launched with no other step in flight. Always those with a common prefix."""
        if self.decode.path == "native" or self.context_parallel:
            return "always"
        return "prefill" if self.prefill.path == "native" else "never"

    @property
    def decode_graphs(self) -> GraphSupport:
        """A native plan is made on the host in every step, so no graph can contain it."""
        return "decode" if self.decode.is_trtllm and not self.context_parallel else "never"

    @property
    def prefill_graphs(self) -> GraphSupport:
        """How many requests of a mixed batch decode is known on the host: a graph would fix it."""
        return "never"

    @property
    def graph_support(self) -> GraphSupport:
        return self.decode_graphs

    def lines(self) -> tuple[str, ...]:
        """For people."""
        named = (("prefill", self.prefill), ("decode", self.decode), ("cascade", self.cascade))
        return tuple(f"{part}: {choice.path} ({choice.reason})" for part, choice in named)

    def check(self) -> Paths:
        if self.problem is not None:
            raise ConfigError(f"attention_backend flashinfer: {self.problem}")
        return self


def is_installed() -> bool:
    """Checked without importing it, which takes seconds."""
    return importlib.util.find_spec(PACKAGE) is not None


def choose_paths(
    capability: tuple[int, int] | None,  # of the GPU; None without one
    shape: HeadShape,
    features: Features,
    installed: bool,
) -> Paths:
    if (problem := _problem(capability, shape, features, installed)) is not None:
        nothing = Choice("none", problem)
        return Paths(nothing, nothing, nothing, features.context_parallel)
    assert capability is not None
    return Paths(
        _choose_prefill(capability, shape),
        _choose_decode(capability, shape, features),
        _choose_cascade(features),
        features.context_parallel,
    )


def _problem(capability: tuple[int, int] | None, shape: HeadShape, features: Features, installed: bool) -> str | None:
    if not installed:
        return NOT_INSTALLED
    if capability is None:
        return "FlashInfer needs an NVIDIA GPU"
    if capability < (8, 0):
        return f"FlashInfer needs sm_80 or newer, this is {_sm(capability)}"
    if shape.dtype not in DTYPES:
        return f"FlashInfer has no kernels for {shape.dtype}; use {' or '.join(DTYPES)}"
    if shape.head_dim not in _HEAD_DIMS:
        return f"FlashInfer has no kernels for heads of {shape.head_dim}; use attention_backend triton"
    if shape.num_heads % shape.num_kv_heads:
        return "query heads must be a multiple of key heads"
    if features.seq_starts:
        return "FlashInfer reads every slot of a sequence; a drafter whose keys have gaps needs triton"
    return None


def _choose_prefill(capability: tuple[int, int], shape: HeadShape) -> Choice:
    if not _has_trtllm(capability):
        return Choice("native", f"trtllm context kernels need sm_100 or sm_103, this is {_sm(capability)}")
    if shape.page_size not in _TRTLLM_PAGE_SIZES:
        return Choice("native", f"trtllm kernels support pages of {_list(_TRTLLM_PAGE_SIZES)}, not {shape.page_size}")
    return Choice("trtllm", f"{_sm(capability)}: lengths stay on the device")


def _choose_decode(capability: tuple[int, int], shape: HeadShape, features: Features) -> Choice:
    if _has_trtllm(capability):
        if shape.page_size not in _TRTLLM_PAGE_SIZES:
            return Choice(
                "native", f"trtllm kernels support pages of {_list(_TRTLLM_PAGE_SIZES)}, not {shape.page_size}"
            )
        return Choice("trtllm", f"{_sm(capability)}: lengths stay on the device")
    if capability != (9, 0):
        return Choice(
            "native", f"trtllm decode is used on sm_90 (as XQA), sm_100 and sm_103, this is {_sm(capability)}"
        )
    if shape.page_size not in _XQA_PAGE_SIZES:
        return Choice("native", f"XQA supports pages of {_list(_XQA_PAGE_SIZES)}, not {shape.page_size}")
    if shape.num_heads // shape.num_kv_heads > _MAX_XQA_GROUP:
        return Choice("native", f"XQA supports at most {_MAX_XQA_GROUP} query heads per key head")
    if features.query_len > MAX_XQA_QUERY:
        return Choice("native", f"XQA is used for at most {MAX_XQA_QUERY} tokens per request")
    if features.query_len > 1 and features.window:
        # It measures the window from the last token of a request and masks no older key of the tile in which it begins.
        return Choice(
            "native", "XQA measures a window from a request's last draft, so earlier ones would see too little"
        )
    return Choice("xqa", "sm_90: trtllm decode runs as XQA; lengths stay on the device")


def _choose_cascade(features: Features) -> Choice:
    if not features.cascade:
        return Choice("none", "not enabled")
    if features.window:
        return Choice("none", "a layer has a window, and the common prefix is read without one")
    return Choice("native", "a common prefix is read once, by a plan of two levels")


def _has_trtllm(capability: tuple[int, int]) -> bool:
    return capability in ((10, 0), (10, 3))


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}"


# --- of a batch -----------------------------------------------------------------------------------


class Needs(NamedTuple):
    """What must be built for a batch, judged over the whole batch."""

    all_uses_trtllm: bool
    seq_lens_cpu: bool  # the exact ones
    paged_kv_indices: bool


def needs_of(
    paths: Paths, num_prefills: int, num_decodes: int, cascade: bool = False, context_parallel: bool = False
) -> Needs:
    """Judged over the whole batch: looking at decodes alone would be wrong in a mixed batch."""
    all_uses_trtllm = (num_prefills == 0 or paths.prefill.is_trtllm) and (num_decodes == 0 or paths.decode.is_trtllm)
    return Needs(
        all_uses_trtllm,
        seq_lens_cpu=context_parallel or cascade or not all_uses_trtllm,
        paged_kv_indices=cascade or not all_uses_trtllm,
    )
