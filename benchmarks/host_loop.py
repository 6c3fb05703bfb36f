"""What a decode step costs the host, part by part: microseconds a step, plain and with n-gram drafts.

Drafts are four in every step, or their number adapts and none would pay, so that they are tried out on the host.

On a CPU the device's work is replaced by recordings that are done at once and give every request a token a step, with
drafts half of them accepted. What is left is the host's loop, without what a driver charges for launches. With
``--device cuda`` the real engine runs and the wait for the device is left out. Output processing, which has a thread of
its own in the engine, is called in between and counted beside the loop.

    python benchmarks/host_loop.py [--device cuda] [--batch 1,8,32,128] [--steps 240] [--flame FILE.svg]
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock
from xml.sax.saxutils import escape

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from slipstream.attention.backends.reference import ReferenceBackend
from slipstream.attention.choice import open_caches
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.config import EngineConfig, EngineOptions, ModelConfig, RopeConfig
from slipstream.device.cpu import CpuDevice
from slipstream.device.interface import Capture, GraphPool
from slipstream.engine.admission import Submission
from slipstream.engine.build import build_shape, decide_draft_length
from slipstream.engine.core import EngineCore
from slipstream.engine.output_processor import OutputProcessor
from slipstream.engine.reader import OutputReader
from slipstream.engine.resolve import resolve
from slipstream.kernels.step.commit import NUM_HEADER_COLUMNS
from slipstream.request import Request
from slipstream.runner.async_output import InFlightStep
from slipstream.runner.pool_head import PoolHead
from slipstream.runner.runner import Runner
from slipstream.sampling_params import SamplingParams
from slipstream.scheduler.draft_length import AdaptiveLength
from slipstream.scheduler.scheduler import Scheduler
from slipstream.speculate.ngram import NgramSpeculator
from slipstream.speculate.options import read_speculation
from slipstream.speculate.speculator import MakeSpeculator, draft_nothing

CASES = ("plain", "n-gram, k = 4", "n-gram, adaptive, none made")
PARTS = ("schedule", "stage", "graphs", "send", "launch, rest", "read", "collect", "look", "step, rest", "output")
NUM_DRAFTS, NUM_ACCEPTED = 4, 2
PROMPT_LEN = 16
STRETCH = 40  # steps; pages are taken about once in it
TINY = ModelConfig("tiny", 64, 8, 8, 1, 1, 1, 8, 1e-5, 4096, RopeConfig(rotary_dim=8), "float32")


class NoModel:
    """Nothing to compute."""

    state = None
    source_encoder = None
    pooled_head = None

    def forward(self, input_ids: Tensor, context: Any) -> Tensor:
        return torch.zeros(input_ids.shape[0], TINY.hidden_size)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[0], TINY.vocab_size)


class Done:
    def replay(self) -> None:
        pass


class InstantDevice(CpuDevice):
    """A CPU with graphs that do nothing when they are replayed."""

    def graph_pool(self) -> GraphPool:
        return object()

    @contextmanager
    def record(self, pool: GraphPool) -> Iterator[Capture]:
        capture = Capture()
        yield capture
        capture.graph = Done()


def _choose_speculator(config: EngineConfig) -> MakeSpeculator:
    speculative = config.speculative
    return draft_nothing if speculative is None else lambda rows, _: NgramSpeculator(speculative, rows)


def instant_core(options: EngineOptions) -> EngineCore:
    """An engine whose steps are done at once; every request goes on for ever."""
    device = InstantDevice()
    config = replace(resolve(options, device.hardware("float32"), TINY), cudagraph_mode="full", steps_in_flight=2)
    config = replace(config, poison=False)  # the results of one step are reused for all
    caches = open_caches(config, config.model, device, attention=ReferenceBackend())
    draft_length, _ = decide_draft_length(config, caches.caps)
    runner = Runner(config, device, NoModel(), caches, _choose_speculator(config))
    runner.graphs.manager.dispatch = _always_a_graph(runner)  # type: ignore[method-assign]
    # Status, drafts checked, drafts accepted, none would accept an unverified one, tokens.
    k = 0 if draft_length is not None else config.num_drafts
    accepted = min(NUM_ACCEPTED, k)
    header = [0, k, accepted, 0]
    assert len(header) == NUM_HEADER_COLUMNS
    assert isinstance(runner.head, PoolHead)
    head = runner.head.generate
    row = [*header, *([7] * (accepted + 1)), *([-1] * (config.num_drafts - accepted))]
    head.out.copy_(torch.tensor(row, dtype=torch.int32).expand_as(head.out))
    return EngineCore(Scheduler(config.scheduler, config.cache, draft_length), runner, config.steps_in_flight)


def make_drafts_dear(core: EngineCore, max_batch: int) -> None:
    """No number of them pays. Steps of prompts may have made some before."""
    policy = core.scheduler.drafts.length
    assert isinstance(policy, AdaptiveLength)
    for batch in range(1, max_batch + 1):
        for k in policy.choices:
            policy.costs.record(batch, k, 1.0 + 100.0 * k)


def _always_a_graph(runner: Runner) -> Callable[..., Any]:
    """Prompts too, for launched one by one they would be computed."""
    dispatch = runner.graphs.manager.dispatch
    largest = max(runner.graphs.recorded, key=lambda desc: (desc.tier == "fast", desc.num_tokens))

    def find(*arguments: Any) -> Any:
        desc = dispatch(*arguments)
        return desc if desc in runner.graphs.recorded else largest

    return find


class Clock:
    """Seconds by part. A part inside another is taken out of it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = self._now()
            try:
                return call(*args, **kwargs)
            finally:
                elapsed = self._now() - start
                self.seconds[name] += elapsed - self._inside.pop()
                self._inside[-1] += elapsed

        return timed


@contextmanager
def timed_parts(core: EngineCore, clock: Clock, waits: bool) -> Iterator[None]:
    """Put the clock around the parts of a step."""
    runner, scheduler, collect = core.runner, core.scheduler, InFlightStep.collect
    assert isinstance(runner.head, PoolHead)

    def read(step: InFlightStep) -> Any:
        result = clock.around("read", collect)(step)
        clock.seconds["read"] -= result.wait_s if waits else 0.0
        return result

    with ExitStack() as patches:
        for owner, name, part in (
            (scheduler, "schedule", "schedule"),
            (runner, "launch", "launch, rest"),
            (runner.batches, "prepare", "stage"),
            (runner.executor, "run", "graphs"),
            (runner.head.generate.outputs, "send", "send"),
            (scheduler, "collect", "collect"),
            (scheduler, "update_draft_length", "look"),
        ):
            patches.enter_context(mock.patch.object(owner, name, clock.around(part, getattr(owner, name))))
        patches.enter_context(mock.patch.object(InFlightStep, "collect", read))
        yield


class Bench:
    """One engine and what becomes of its tokens."""

    def __init__(self, device: str, max_batch: int, num_steps: int, case: str) -> None:
        self.num_steps = num_steps
        drafts, adaptive = case != CASES[0], case == CASES[2]
        # A CPU may be shared: what counts is the time it worked for this thread. A wait for a GPU may be work as well.
        self.waits = device != "cpu"
        self.now = time.perf_counter if self.waits else time.thread_time
        # A real model of random weights soon repeats itself, and then all drafts are right.
        most = (NUM_ACCEPTED if device == "cpu" else NUM_DRAFTS) if drafts and not adaptive else 0
        total = PROMPT_LEN + (1 + most) * (num_steps + 100) + 64
        options = EngineOptions(
            device=device,
            dtype="float32" if device == "cpu" else "bfloat16",
            max_num_seqs=max_batch,
            max_num_batched_tokens=max(2048, max_batch * (1 + NUM_DRAFTS)),
            max_model_len=2048,
            num_gpu_blocks_override=4 * max_batch * (total // 16 + 1) if device == "cpu" else None,
            speculative_config={"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "adaptive": adaptive}
            if drafts
            else None,
            cudagraph_capture_sizes=(1, 8, 32, 128, 512) if device == "cpu" else None,
        )
        self.core = instant_core(options) if device == "cpu" else build_shape(options, "smollm2-135m").core
        if adaptive:
            while self.waits and self.core.use_idle_time():
                pass  # steps without drafts have no graph before that
            make_drafts_dear(self.core, max_batch)
        self.output = OutputProcessor(_NoText(), lambda _request_id: None, read_speculation(options))
        self._submissions: list[Submission] = []
        self._total = min(total, 2048)

    def begin(self, batch: int) -> list[Request]:
        params = SamplingParams(temperature=0.0, seed=0, ignore_eos=True).with_defaults(SamplingParams())
        requests = []
        for i in range(batch):
            # Lengths that differ, so that page borders are crossed at different steps.
            prompt = tuple((7 * i + j) % 64 for j in range(PROMPT_LEN - i % 16))
            request = Request(f"request-{batch}-{i}", prompt, params, (2,), self._total, time.monotonic())
            submission = Submission(request.request_id, None, (request,))
            reader = OutputReader(submission, lambda _output: None, every_token=False)
            reader.begin(self.output.register(submission, reader))
            self._submissions.append(submission)
            self.core.add(request)
            requests.append(request)
        for _ in range(60):
            self.step()
        return requests

    def step(self) -> None:
        self.output.process(self.core.step())

    def end(self, requests: list[Request]) -> None:
        for request in requests:
            self.core.finish(request.request_id)
        for submission in self._submissions:
            self.output.forget(submission)
        self._submissions.clear()
        while self.core.has_work:
            self.core.step()


class _NoText:
    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return ""


def measure(bench: Bench, case: str, batch: int, repeat: int) -> dict[str, Any]:
    """The quietest of many short stretches: ``host_us`` of a whole step but its wait, and then part by part."""
    best: dict[str, float] = {}
    host_us, tokens_per_step = float("inf"), 0.0
    for _ in range(repeat):
        requests = bench.begin(batch)
        for _ in range(bench.num_steps // 2 // STRETCH):
            stats, taken = bench.core.stats, 0.0
            waited, num_out = stats.step_s.total - stats.host_s.total, stats.num_tokens_out
            for _ in range(STRETCH):
                start = bench.now()
                updates = bench.core.step()
                taken += bench.now() - start
                bench.output.process(updates)
            if bench.waits:
                taken -= stats.step_s.total - stats.host_s.total - waited
            host_us = min(host_us, 1e6 * taken / STRETCH)
            tokens_per_step = (stats.num_tokens_out - num_out) / STRETCH
        for _ in range(bench.num_steps // 2 // STRETCH):
            found = _by_part(bench)
            if not best or sum(found.values()) < sum(best.values()):
                best = found
        bench.end(requests)
    loop_us = sum(best.values())
    row: dict[str, Any] = {"case": case, "batch": batch, "tok_s": round(1e6 * tokens_per_step / loop_us, 1)}
    row |= {"host_us": round(host_us, 1), "loop_us": round(loop_us, 1)}
    return row | {"parts_us": {name: round(best.get(name, 0.0), 1) for name in PARTS}}


def _by_part(bench: Bench) -> dict[str, float]:
    """Microseconds a step."""
    core, clock = bench.core, Clock(bench.now)
    with timed_parts(core, clock, bench.waits):
        step, process = clock.around("step, rest", core.step), clock.around("output", bench.output.process)
        for _ in range(STRETCH):
            process(step())
    return {name: 1e6 * seconds / STRETCH for name, seconds in clock.seconds.items()}


# --- the flame graph ------------------------------------------------------------------------------


def sample_stacks(bench: Bench, batch: int, seconds: float) -> Counter[tuple[str, ...]]:
    """Where the loop is, half a millisecond after half a millisecond of its own time."""
    stacks: Counter[tuple[str, ...]] = Counter()

    def note(_signum: int, frame: FrameType | None) -> None:
        names: list[str] = []
        while frame is not None and frame.f_code.co_name != "sample_stacks":
            code = frame.f_code
            if code is note.__code__:
                return  # the last sample was not done yet
            names.append(f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]})")
            frame = frame.f_back
        stacks[tuple(reversed(names))] += 1

    end = time.monotonic() + seconds
    before = signal.signal(signal.SIGPROF, note)
    try:
        while time.monotonic() < end:
            requests = bench.begin(batch)
            signal.setitimer(signal.ITIMER_PROF, 0.0005, 0.0005)
            for _ in range(bench.num_steps):
                bench.step()
            signal.setitimer(signal.ITIMER_PROF, 0)
            bench.end(requests)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return stacks


def draw_flames(stacks: Counter[tuple[str, ...]], title: str) -> str:
    """An SVG: a call is as wide as the share of samples it was seen in, and lies on its caller."""
    width, line, total = 1200, 18, sum(stacks.values())
    depth = max(map(len, stacks), default=0)
    boxes: list[str] = []

    def draw(prefix: tuple[str, ...], left: float) -> None:
        level = len(prefix)
        below = Counter[str]()
        for stack, count in stacks.items():
            if len(stack) > level and stack[:level] == prefix:
                below[stack[level]] += count
        for name, count in sorted(below.items()):
            wide = width * count / total
            if wide >= 1:
                top = (depth - level) * line + 12
                shade = 30 + sum(map(ord, name)) % 25
                label = escape(name if len(name) * 6.4 < wide else name[: max(0, int(wide / 6.4) - 1)])
                box = f'x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{line - 1}"'
                boxes.append(
                    f"<g><title>{escape(name)}: {100 * count / total:.1f}%</title>"
                    f'<rect {box} fill="hsl({shade},85%,68%)"/>'
                    f'<text x="{left + 3:.1f}" y="{top + 13}">{label}</text></g>'
                )
                draw((*prefix, name), left)
            left += wide

    draw((), 0.0)
    height = (depth + 1) * line + 20
    box = f'viewBox="0 0 {width} {height}" font-family="monospace" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    heading = f'<text x="4" y="14" font-size="13">{escape(title)}</text>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', heading, *boxes, "</svg>\n"])


# --- the command ----------------------------------------------------------------------------------


def report(rows: list[dict[str, Any]], device: str) -> Table:
    table = Table("case", "batch", title=f"host microseconds a step, {device}")
    for name in ("host", *PARTS, "loop + output"):
        table.add_column(name, justify="right")
    for row in rows:
        parts = [f"{row['parts_us'][name]:.1f}" for name in PARTS]
        table.add_row(row["case"], str(row["batch"]), f"{row['host_us']:.1f}", *parts, f"{row['loop_us']:.1f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", default="1,8,32,128")
    parser.add_argument("--steps", type=int, default=240, help="of every run; the first half is timed as a whole")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--flame", type=Path, help="draw where the loop spends its time at the largest batch")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    prepare_folder(arguments.output_dir)
    torch.set_num_threads(1)
    with torch.inference_mode():  # as in the engine's own loop
        run(arguments)
    return 0


def run(arguments: argparse.Namespace) -> None:
    batches = [int(size) for size in arguments.batch.split(",")]
    rows = []
    for case in CASES:
        bench = Bench(arguments.device, max(batches), arguments.steps, case)
        rows += [measure(bench, case, batch, arguments.repeat) for batch in batches]
        if arguments.flame and case == CASES[0]:
            stacks = sample_stacks(bench, max(batches), seconds=12)
            title = f"The host loop, batch {max(batches)}, device {arguments.device}, {sum(stacks.values())} samples"
            arguments.flame.write_text(draw_flames(stacks, title), encoding="utf-8")
    path = write_results(collect_results(rows, device=arguments.device), arguments.output_dir, "host-loop")
    Console(width=150).print(report(rows, arguments.device))
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
