"""What a sampling operation declares: its parameters, its columns of the request rows, when a batch needs it, itself.

One file for each, with an ``OPERATION``. From these the registry knows the order of the sampler, the rows their layout,
and a batch what it needs; nothing else names an operation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from slipstream.columns import Column
from slipstream.parameters import Parameter
from slipstream.types import Request


class Stage(enum.IntEnum):
    """The order of the sampler. From ``TEMPERATURE`` on, operations run only where a request is not greedy."""

    POSITION = 0  # what a position may hold at all
    HISTORY = 1  # what depends on the tokens before
    LOGITS = 2  # what cuts the distribution, whatever its temperature
    TEMPERATURE = 3
    DISTRIBUTION = 4  # what cuts the distribution at its temperature


class Positions(NamedTuple):
    """What the rows of a step's logits belong to. A request has one for its next token and one after each draft."""

    rows: Tensor  # [n] int32: the request row; the scratch row in padding
    positions: Tensor  # [n] int32: the position of the token to be drawn, so how many tokens come before it


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What sampling reads of every request row, on the device. All are [num_rows] unless said otherwise."""

    temperature: Tensor  # float32
    seeds: Tensor  # [num_rows, 2] int32
    choice: Tensor  # int32
    stop_ids: Tensor  # [num_rows, max_stop_ids] int32, padded with -1
    prompt_len: Tensor  # int32
    token_ids: Tensor  # [num_rows, max_len] int32; a row's drafts follow its tokens
    columns: Mapping[str, Tensor]  # of the operations, by name: [num_rows, *shape]
    operations: tuple[SamplingOperation, ...]  # that have columns here, in order

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]


def _check_nothing(_request: Request, _vocab_size: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class SamplingOperation:
    name: str
    stage: Stage
    # Launches only, for it runs in graphs. Every row is given the logits and the history of its own position, drafts
    # before it included, so that what comes out is the same with speculation and without.
    apply: Callable[[Tensor, SamplingRows, Positions], Tensor]  # [n, vocab] -> [n, vocab]
    needed: Callable[[Request], bool]  # a batch runs it if one request needs it
    parameters: tuple[Parameter, ...] = ()
    columns: tuple[Column, ...] = ()
    after: tuple[str, ...] = ()  # operations of the same stage that come before it, where they are there
    # What a request may not ask of a model with so many tokens: raises RequestError before anything runs.
    check: Callable[[Request, int], None] = _check_nothing


def is_sampled(request: Request) -> bool:
    """Whether the request's tokens are drawn; a greedy one takes the largest logit, whatever is cut below."""
    return bool(request.params.temperature)
