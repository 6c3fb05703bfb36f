"""What a model adds to requests and steps, beside the caches of its layers.

Its columns of the request rows hold what a request brings; from them, and from what the host stages before a step, the
state prepares inputs of the forward pass, such as a number for each token. Runner and scheduler know none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.columns import Column
from slipstream.parameters import Parameter
from slipstream.plan import StepPlan
from slipstream.request import Request


class StateSetting(NamedTuple):
    """What a state makes its memory from."""

    columns: Mapping[str, Tensor]  # its own, on the device, by name: [num_rows, *shape]
    max_tokens: int  # of a step
    device: torch.device


class StepRequests(NamedTuple):
    """A step's tokens, and whose they are. In a recording it is padding that belongs to the scratch row."""

    batch_rows: Tensor  # [padded_reqs] int32
    query_start_loc: Tensor  # [padded_reqs + 1] int32
    query_lens: Tensor  # [padded_reqs] int32: of each request's tokens those that are computed
    positions: Tensor  # [padded_tokens] int64


class ModelState(Protocol):
    columns: Sequence[Column]
    parameters: Sequence[Parameter]  # that a request may give as ``extra``; declared with ``register_parameter``

    def open(self, setting: StateSetting) -> None:
        """Before the first step."""
        ...

    def cache_key(self, request: Request) -> bytes:
        """Requests share cached pages if they have equal tokens and equal keys. Empty where tokens say it all."""
        ...

    def begin_step(self, plan: StepPlan) -> None:
        """On the host, before the step's launches: stage what the step needs, without waiting for the device."""
        ...

    def prepare(self, requests: StepRequests) -> Any:
        """The step's inputs, which the forward pass finds as ``context.inputs``.

        Launches alone, into memory that stays where it is, for this is recorded in graphs.
        """
        ...

    def step_buffers(self) -> tuple[Tensor, ...]:
        """Memory that every step fills anew. Debug runs poison it before."""
        ...
