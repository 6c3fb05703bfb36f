"""The declaration of a sampling operation: its parameters, its columns of the request rows, its condition, its code.

One file each, with an ``OPERATION``. From these the registry derives the order of the sampler, the rows their layout,
and a batch its needs; operations are named nowhere else.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from slipstream.columns import Column
from slipstream.parameters import Parameter
from slipstream.request import Request


class Stage(enum.IntEnum):
    """The order of the sampler. From ``TEMPERATURE`` on, operations run only if a request is not greedy."""

    POSITION = 0  # which tokens are allowed at a position
    HISTORY = 1  # depends on the tokens before
    LOGITS = 2  # truncates the distribution before temperature
    TEMPERATURE = 3
    DISTRIBUTION = 4  # truncates the distribution after temperature


class Positions(NamedTuple):
    """The rows and positions of a step's logits. A request has one for its next token and one after each draft."""

    rows: Tensor  # [n] int32: the request row; the scratch row in padding
    positions: Tensor  # [n] int32: the position of the token to draw, which is the number of tokens before it


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What sampling reads of every request row, on the device. Shapes are [num_rows] unless noted otherwise."""

    temperature: Tensor  # float32
    seeds: Tensor  # [num_rows, 2] int32
    choice: Tensor  # int32
    stop_ids: Tensor  # [num_rows, max_stop_ids] int32, padded with -1
    prompt_len: Tensor  # int32
    token_ids: Tensor  # [num_rows, max_len] int32; a row's drafts follow its tokens
    columns: Mapping[str, Tensor]  # of the operations, by name: [num_rows, *shape]
    operations: tuple[SamplingOperation, ...]  # those that have columns, in order
    exact: bool = False  # a row's result depends on its own logits alone, to the bit

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]


def _check_nothing(_request: Request, _vocab_size: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class SamplingOperation:
    name: str
    stage: Stage
    # Launches only, since it runs in graphs. Every row gets the logits and the history of its own position, including
    # the drafts before it, so that results are the same with and without speculation.
    apply: Callable[[Tensor, SamplingRows, Positions], Tensor]  # [n, vocab] -> [n, vocab]
    needed: Callable[[Request], bool]  # a batch runs it if one request needs it
    parameters: tuple[Parameter, ...] = ()
    columns: tuple[Column, ...] = ()
    after: tuple[str, ...] = ()  # operations of the same stage that run before it, if registered
    # Checks a request against the vocabulary size: raises RequestError before anything runs.
    check: Callable[[Request, int], None] = _check_nothing


def is_sampled(request: Request) -> bool:
    """Whether the request is not greedy. A greedy one takes the largest logit, whatever else is truncated."""
    return bool(request.params.temperature)
