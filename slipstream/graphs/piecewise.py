"""A forward pass in pieces: what lies between attention layers is recorded, attention is launched anew each step.

For backends whose attention no graph can hold, and for batches whose attention must know the step's true shape.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.attention.backend import AttentionContext, AttentionLayer, HeadNorms
from slipstream.device.interface import Capture, Device, Graph, GraphPool


class _Break(NamedTuple):
    """An attention layer between two pieces, with the addresses that the pieces use."""

    layer: AttentionLayer
    q: Tensor
    k: Tensor
    v: Tensor
    cos_sin: Tensor
    norms: HeadNorms | None
    out: Tensor  # the next piece reads it


@dataclass(slots=True)
class _SplittingContext(AttentionContext):
    """Ends a piece where attention begins, and starts the next one behind it."""

    recorder: PiecewiseForward | None = None

    def attend(
        self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, norms: HeadNorms | None = None
    ) -> Tensor:
        assert self.recorder is not None
        self.recorder.end_piece()
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        self.recorder.breaks.append(_Break(layer, q, k, v, cos_sin, norms, out))
        self.recorder.begin_piece()
        return out


class PiecewiseForward:
    def __init__(self, device: Device, pool: GraphPool) -> None:
        self._device = device
        self._pool = pool
        self._pieces: list[Graph] = []
        self._open: tuple[AbstractContextManager[Capture], Capture] | None = None
        self.breaks: list[_Break] = []
        self.output: Tensor | None = None

    def record(self, forward: Callable[[AttentionContext], Tensor], context: AttentionContext) -> None:
        """Record a pass. Attention does not run, so neither do its inputs need to be there."""
        splitting = _SplittingContext(
            *(context.backend, context.metadata, context.kv_caches, context.positions, context.slot_mapping),
            taps=context.taps,
            recurrence=context.recurrence,  # goes into the pieces: it reads every length on the device
            recorder=self,
        )
        self.begin_piece()
        try:
            self.output = forward(splitting)
        except BaseException as error:
            if self._open is not None:
                self._open[0].__exit__(type(error), error, error.__traceback__)
            raise
        self.end_piece()

    def begin_piece(self) -> None:
        manager = self._device.record(self._pool)
        self._open = (manager, manager.__enter__())

    def end_piece(self) -> None:
        assert self._open is not None
        manager, capture = self._open
        self._open = None
        manager.__exit__(None, None, None)
        assert capture.graph is not None
        self._pieces.append(capture.graph)

    def replay(self, context: AttentionContext) -> Tensor:
        """The pass over this step's inputs; ``context`` is the step's own."""
        for i, piece in enumerate(self._pieces):
            piece.replay()
            if i < len(self.breaks):
                layer, q, k, v, cos_sin, norms, out = self.breaks[i]
                out.copy_(context.attend(layer, q, k, v, cos_sin, norms))
        assert self.output is not None
        return self.output
