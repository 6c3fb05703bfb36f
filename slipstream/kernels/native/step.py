"""A step's bookkeeping in C: the structures that ``step.c`` takes, made of the bundles of its operations."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from slipstream.device.operation import Operation
from slipstream.kernels import native
from slipstream.kernels.native.records import fields
from slipstream.kernels.request_rows import RowState
from slipstream.kernels.triton_jit import interprets

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class RowsRecord(ctypes.Structure):
    _fields_ = fields(
        _POINTER,
        "token_ids page_table num_computed num_tokens num_drafts max_drafts max_total status step_start stop_ids "
        "draft_start draft_end",
    ) + fields(_NUMBER, "num_rows max_len max_pages max_stop_ids")


class BatchRecord(ctypes.Structure):
    _fields_ = fields(_POINTER, "rows query_start_loc logit_start_loc") + fields(_NUMBER, "num_reqs")


class TokensRecord(ctypes.Structure):
    _fields_ = fields(_POINTER, "input_ids positions slot_mapping") + fields(_NUMBER, "num_padded")


class StepInputsRecord(ctypes.Structure):
    _fields_ = fields(
        _POINTER, "query_lens seq_lens block_table logit_indices logit_rows logit_positions logit_drafts"
    ) + fields(_NUMBER, "num_logits page_size")


class NewTokensRecord(ctypes.Structure):
    _fields_ = fields(_POINTER, "new_ids num_accepted failed would_be_accepted query_lens out") + fields(
        _NUMBER, "width wide columns"
    )


class PassInputsRecord(ctypes.Structure):
    _fields_ = fields(_POINTER, "query_lens seq_lens draft_positions last_indices block_table") + fields(
        _NUMBER, "page_size vocab_size"
    )


class RotationRecord(ctypes.Structure):
    _fields_ = fields(_POINTER, "cos_sin positions slot_mapping cosine sine pages offsets") + fields(
        _NUMBER, "num_tokens half spare_page page_size max_position"
    )


def record(kind: type[ctypes.Structure], *values: Tensor | int | None) -> Any:
    """A structure for a call, by reference; tensors are passed as their addresses."""
    return ctypes.byref(kind(*[value.data_ptr() if isinstance(value, Tensor) else value for value in values]))


def rows_record(rows: RowState) -> Any:
    return record(
        RowsRecord,
        rows.token_ids,
        rows.page_table,
        rows.num_computed,
        rows.num_tokens,
        rows.num_drafts,
        rows.max_drafts,
        rows.max_total,
        rows.status,
        rows.step_start,
        rows.stop_ids,
        rows.draft_start,
        rows.draft_end,
        rows.token_ids.shape[0],
        rows.token_ids.shape[-1],
        rows.page_table.shape[-1],
        rows.stop_ids.shape[-1],
    )


def batch_record(
    batch_rows: Tensor, query_start_loc: Tensor | None = None, logit_start_loc: Tensor | None = None
) -> Any:
    return record(BatchRecord, batch_rows, query_start_loc, logit_start_loc, batch_rows.shape[0])


def compiled() -> ctypes.CDLL:
    """The kernels, for a function that is called only where there are any."""
    lib = native.library()
    assert lib is not None
    return lib


def in_c(operation: Operation[Any, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function computes the operation on CPU tensors, where there are compiled kernels."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def compute(*args: Any, **kwargs: Any) -> Any:
            is_compiled = not interprets() and native.library() is not None
            return (run if is_compiled else operation.body)(*args, **kwargs)

        operation.on_cpu = compute
        return run

    return decorate
