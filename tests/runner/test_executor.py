"""What the executor leaves to the head: the results after a whole graph, and elsewhere all that follows the target."""

from __future__ import annotations

from typing import Any

from slipstream.device.sim import SimDevice
from slipstream.engine.core import EngineCore
from slipstream.plan import Composition
from slipstream.runner.program import TargetOutput
from tests.engine.drive import make_request
from tests.sim.world import World


class LoggedWork:
    """A head's work that notes what the executor and the runner call."""

    def __init__(self, work: Any, calls: list[str]) -> None:
        self._work, self._calls = work, calls
        self.tier, self.num_drafts, self.needs_masks = work.tier, work.num_drafts, work.needs_masks

    def begin(self, batch: Any, graph: Any) -> None:
        self._calls.append("begin" if graph is None else f"begin in a graph of {graph.num_tokens}")
        self._work.begin(batch, graph)

    def taps(self, num_tokens: int) -> Any:
        self._calls.append(f"taps of {num_tokens}")
        return self._work.taps(num_tokens)

    def run(self, target: TargetOutput) -> Any:
        sizes = (target.hidden.shape[0], target.inputs.input_ids.shape[0], target.batch.attention.num_actual_tokens)
        self._calls.append(f"run after {target.graph.mode.value}: {sizes}")
        return self._work.run(target)

    def send(self, plan: Any, batch: Any, hidden: Any, found: Any) -> Any:
        self._calls.append(f"send {batch.attention.num_actual_tokens} of {hidden.shape[0]}")
        return self._work.send(plan, batch, hidden, found)


def calls_of_steps(mode: str, **params: Any) -> tuple[list[str], list[str]]:
    """Of a prompt of three tokens and of a decode, where graphs have 4 and 16 tokens."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "num_gpu_blocks_override": 64}
    steps = {"steps_in_flight": 1, "long_prefill_token_threshold": 16, "speculative_config": None}
    graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": (4, 16)}
    world = World(3, {"block_size": 16, **steps, **sizes, **graphs}, frozenset())
    world.device = SimDevice(1)
    core: EngineCore = world._build(world.resolve())
    while core.use_idle_time():
        pass
    calls: list[str] = []
    work_for = core.runner.head.work_for

    def logged(composition: Composition) -> Any:
        return LoggedWork(work_for(composition), calls)

    core.runner.head.work_for = logged  # type: ignore[method-assign]
    core.add(make_request("a", [5, 6, 7], 3, ignore_eos=True, **params))
    found = []
    for _ in range(2):
        calls.clear()
        core.step()
        found.append(list(calls))
    return found[0], found[1]


def test_launch_by_launch_the_head_runs_at_the_batchs_own_size() -> None:
    prompt, decode = calls_of_steps("none")
    assert prompt == ["begin", "taps of 3", "run after none: (3, 3, 3)", "send 3 of 3"]
    assert decode == ["begin", "taps of 1", "run after none: (1, 1, 1)", "send 1 of 1"]


def test_a_graph_of_the_whole_step_holds_the_heads_part() -> None:
    prompt, decode = calls_of_steps("full")
    assert prompt == ["begin in a graph of 4", "send 3 of 4"]
    assert decode == ["begin in a graph of 4", "send 1 of 4"]


def test_after_a_graph_of_the_target_the_head_runs_over_padded_inputs_with_the_steps_numbers() -> None:
    prompt, decode = calls_of_steps("full", presence_penalty=1.0)
    assert prompt == ["begin", "run after full: (4, 4, 3)", "send 3 of 4"]
    assert decode == ["begin", "run after full: (4, 4, 1)", "send 1 of 4"]


def test_after_pieces_the_head_runs_over_padded_inputs() -> None:
    prompt, decode = calls_of_steps("piecewise")
    assert prompt == ["begin", "run after piecewise: (4, 4, 3)", "send 3 of 4"]
    assert decode == ["begin", "run after piecewise: (4, 4, 1)", "send 1 of 4"]
