"""A model with a state of its own, in one file: Llama whose embeddings are shifted by a bias of the request's choice.

``shift`` is the number of a bias, 0 for none. It is a column of the request rows. Before each step the state gathers
the bias of every token, which the forward pass adds to the embeddings. So requests that differ in nothing else have
other keys, and must not share pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.attention.context import AttentionContext
from slipstream.columns import Column
from slipstream.device.operation import operation
from slipstream.models.llama import Llama
from slipstream.models.model_state import StateSetting, StepRequests
from slipstream.parameters import Parameter
from slipstream.plan import StepPlan
from slipstream.request import Request
from slipstream.sampling_params import value_of
from slipstream.values import Bounds

NAME = "ShiftedForCausalLM"
NUM_SHIFTS = 3
SHIFT = Parameter("shift", Bounds(0, NUM_SHIFTS - 1, is_integer=True, may_be_none=False), "Number of a bias.", 0)


def biases(size: int) -> Tensor:
    """[NUM_SHIFTS, size] float64; the first is none."""
    generator = torch.Generator().manual_seed(11)
    made = torch.randn(NUM_SHIFTS, size, generator=generator, dtype=torch.float64)
    made[0] = 0
    return made


@operation(writes=("out",))
def gather_shifts(
    table: Tensor,  # [NUM_SHIFTS, size]
    shifts: Tensor,  # [num_rows] int32
    batch_rows: Tensor,  # [padded_reqs] int32
    query_start_loc: Tensor,  # [padded_reqs + 1] int32
    query_lens: Tensor,  # [padded_reqs] int32
    out: Tensor,  # [padded_tokens, size]; zeros where no token is computed
) -> None:
    out.zero_()
    columns = (batch_rows.tolist(), query_start_loc[:-1].tolist(), query_lens.tolist())
    for row, start, count in zip(*columns, strict=True):
        out[start : start + count] = table[int(shifts[row])]


class ShiftState:
    columns = (Column("shift", lambda request: value_of(request.params, SHIFT)),)
    parameters = (SHIFT,)

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._table = biases(size).to(dtype)
        self.num_begun = 0

    def open(self, setting: StateSetting) -> None:
        self._shifts = setting.columns["shift"]
        size, dtype = self._table.shape[1], self._table.dtype
        self._of_tokens = torch.zeros(setting.max_tokens, size, dtype=dtype, device=setting.device)
        on_device = torch.zeros(self._table.shape, dtype=dtype, device=setting.device)
        on_device.copy_(self._table)
        self._table = on_device

    def cache_key(self, request: Request) -> bytes:
        number: int = value_of(request.params, SHIFT)
        return bytes([number]) if number else b""

    def begin_step(self, plan: StepPlan) -> None:
        self.num_begun += 1

    def prepare(self, requests: StepRequests) -> Tensor:
        out = self._of_tokens[: requests.positions.shape[0]]
        gather_shifts(
            self._table, self._shifts, requests.batch_rows, requests.query_start_loc, requests.query_lens, out
        )
        return out

    def step_buffers(self) -> tuple[Tensor, ...]:
        return (self._of_tokens,)


class Shifted(Llama):
    def __init__(self, config: Any, max_position: int) -> None:
        super().__init__(config, max_position)
        if self.device.type != "meta":
            with torch.device("cpu"):
                self.state = ShiftState(config.hidden_size, torch.get_default_dtype())

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        hidden = self.model.embed_tokens(input_ids) + context.inputs
        residual: Tensor | None = None
        for idx, (layer, cos_sin) in enumerate(zip(self.model.layers, self.cos_sin, strict=True)):
            context.tap(idx, hidden, residual)
            hidden, residual = layer(hidden, residual, context, cos_sin)
        assert residual is not None
        return self._finish(hidden, residual, context)
