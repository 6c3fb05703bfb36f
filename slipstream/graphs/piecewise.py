"""A piecewise forward pass: what is between attention layers is captured, attention is launched in every step.

For backends whose attention cannot be captured, and for batches whose attention needs the step's true shape.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from slipstream.attention.context import AttentionContext, CacheLayer, GroupStep
from slipstream.device.interface import Capture, Device, Graph, GraphPool


class _Break(NamedTuple):
    """A layer between two pieces, with the addresses that the pieces use."""

    layer: CacheLayer
    inputs: Any  # the piece before writes its tensors
    out: Tensor  # the next piece reads it


@dataclass(slots=True)
class _SplittingContext(AttentionContext):
    """Ends a piece before a layer that is launched in every step, and starts the next one after it."""

    recorder: PiecewiseForward | None = None

    def run(self, layer: CacheLayer, inputs: Any) -> Tensor:
        step: GroupStep = self.at(layer)
        if step.is_recorded:
            return step.run(layer, inputs)
        assert self.recorder is not None
        self.recorder.end_piece()
        out = step.make_output(inputs)
        self.recorder.breaks.append(_Break(layer, inputs, out))
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
        """Capture a pass. Attention does not run, so its inputs need not exist."""
        splitting = _SplittingContext(
            context.group_steps,
            context.group_of_layer,
            context.positions,
            context.slot_mapping,
            context.taps,
            inputs=context.inputs,
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
        """Run the pass on this step's inputs; ``context`` is the step's own."""
        for i, piece in enumerate(self._pieces):
            piece.replay()
            if i < len(self.breaks):
                layer, inputs, out = self.breaks[i]
                out.copy_(context.run(layer, inputs))
        assert self.output is not None
        return self.output
