"""``slipstream bench serve``: load on an OpenAI-compatible server, and the measured latencies and rates."""

from __future__ import annotations

import resource
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from slipstream.commands.bench import case_name
from slipstream.commands.machine import num_cores
from slipstream.commands.results import Row, collect_results, prepare_folder, write_results
from slipstream.errors import ConfigError
from slipstream.load import plots, report
from slipstream.load.arrivals import draw_arrivals, read_trace
from slipstream.load.figures import measure, most_at_once
from slipstream.load.processes import Progress as Counts
from slipstream.load.processes import client_processes, share_out
from slipstream.load.records import Records
from slipstream.load.settings import LoadSettings, Point
from slipstream.load.target import Target
from slipstream.load.worker import Task
from slipstream.load.workload import BodyFormat, DataSet, Synthetic, Trace, Workload, read_data_set

EXIT_NOTHING_MEASURED = 2
EXIT_INTERRUPTED = 130
# Open files of a client process besides its streams.
_OTHER_FILES = 64


@dataclass(frozen=True, slots=True)
class Output:
    """Where the results go."""

    folder: Path
    png: Path | None = None
    as_json: bool = False


class Interruption:
    """Whether Ctrl-C was pressed. A second Ctrl-C ends the program as usual."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self) -> bool:
        return self.has_come

    @contextmanager
    def noticed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # signals can be handled in the main thread only
            yield
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.has_come:
            raise KeyboardInterrupt
        self.has_come = True


@dataclass(frozen=True, slots=True)
class Load:
    """What all runs share: the server, the workload and the settings."""

    settings: LoadSettings
    target: Target
    body_format: BodyFormat
    seed: int
    data: DataSet | Trace | None  # None: synthetic prompts

    @classmethod
    def prepare(cls, settings: LoadSettings) -> Load:
        """Read the files and ask the server for its model."""
        seed = secrets.randbelow(1 << 31) if settings.seed is None else settings.seed
        data = _read_data(settings, seed)
        target = Target.parse(settings.url, settings.api_key)
        model = settings.model or target.first_model()
        return cls(settings, target, _body_format(settings, model), seed, data)

    @property
    def num_available(self) -> int | None:
        if self.data is None:
            return None
        return len(self.data.asked if isinstance(self.data, DataSet) else self.data.entries)

    def tasks(self, run_idx: int, point: Point) -> list[Task]:
        """The tasks of the client processes in one run."""
        num_requests = self.settings.num_requests(point, self.num_available)
        num_processes = self.settings.num_processes(num_cores(), point, num_requests)
        _check_files(point, num_processes)
        due = self._due(point, num_requests)
        workload = self._workload(run_idx)

        def task(rank: int, indices: range, warmups: range) -> Task:
            streams = None if point.streams is None else len(range(rank, point.streams, num_processes))
            own_due = tuple(due[rank::num_processes])
            timeout_s = self.settings.timeout_s
            return Task(self.target, self.body_format, workload, indices, streams, own_due, warmups, timeout_s)

        return share_out(num_processes, task, num_requests, self.settings.warmup)

    def describe(self, point: Point) -> Row:
        """The columns of a row that describe the load."""
        settings = self.settings
        about: Row = {"loop": "open" if point.streams is None else "closed"}
        if point.rate is not None:
            about |= {"rate": point.rate if point.rate < float("inf") else "inf", "burstiness": settings.burstiness}
        about |= {"url": settings.url, "api": settings.api, "model": self.body_format.model}
        for name, path in (("dataset", settings.dataset), ("trace", settings.trace)):
            if path is not None:
                about[name] = Path(path).name
        if self.data is None:
            about |= {"prompt_len": settings.prompt_len, "prefix_len": settings.prefix_len}
            about |= {"len_spread": settings.len_spread}
        about |= {"output_len": settings.output_len, "ignore_eos": self.body_format.ignore_eos}
        return about | {"temperature": settings.temperature, "warmup": settings.warmup, "seed": self.seed}

    def _workload(self, run_idx: int) -> Workload:
        """Synthetic prompts are different in every run, so that no prefix cache has them."""
        settings = self.settings
        if self.data is not None:
            return self.data
        lengths = (settings.prompt_len, settings.output_len, settings.len_spread, settings.prefix_len)
        return Synthetic(f"{self.seed}/{run_idx}", *lengths, settings.vocab_size)

    def _due(self, point: Point, num_requests: int) -> Sequence[float]:
        if point.streams is not None:
            return ()
        if isinstance(self.data, Trace) and point.rate is None:
            return [entry.at for entry in self.data.entries[:num_requests]]
        assert point.rate is not None
        found: list[float] = draw_arrivals(point.rate, self.settings.burstiness, num_requests, self.seed).tolist()
        return found


def run(settings: LoadSettings, output: Output) -> int:
    if output.png is not None:
        plots.check_plots(output.png)
    load = Load.prepare(settings)
    prepare_folder(output.folder)
    case = settings.case or f"{case_name(load.body_format.model)}+serve"
    rows: list[Row] = []
    runs: list[tuple[str, Records]] = []
    interruption = Interruption()
    with interruption.noticed():
        for run_idx, point in enumerate(settings.points()):
            records = _measure(load, run_idx, point, interruption)
            if records is not None and (records.is_ok.any() or not interruption.has_come):
                rows.append(_row(load, case, point, records, interruption))
                runs.append((str(point), records))
                _say(f"{point}: {rows[-1]['tok_s']:,.1f} tokens per second, {rows[-1]['failed']} requests failed")
            if interruption.has_come:
                break
    if not rows:
        _say("interrupted before a request had ended")
        return EXIT_INTERRUPTED
    _show(rows, runs, load, case, output)
    if interruption.has_come:
        _say("interrupted: the figures are of the requests that had ended")
        return EXIT_INTERRUPTED
    return 0 if all(row["requests"] for row in rows) else EXIT_NOTHING_MEASURED


def run_compare(first: Path, second: Path) -> int:
    """Two result files side by side."""
    rows = [report.read_rows(path) for path in (first, second)]
    names = (str(rows[0][0]["case"]), str(rows[1][0]["case"]))
    Console().print(report.compare(rows[0], rows[1], names))
    _say(f"a: {first}\nb: {second}")
    return 0


def _measure(load: Load, run_idx: int, point: Point, interruption: Interruption) -> Records | None:
    """One run; None if it was interrupted before it began."""
    tasks = load.tasks(run_idx, point)
    total = sum(len(task.indices) for task in tasks)
    with client_processes(tasks) as processes, _progress() as bar:
        shown = bar.add_task(f"{point}: getting ready", total=total, figures="")
        if not processes.warm_up(interruption):
            return None

        def show(counts: Counts) -> None:
            failed = f", {counts.num_failed} failed" if counts.num_failed else ""
            figures = f"{counts.num_ok:,} of {total:,} requests{failed}, {counts.num_events:,} events"
            bar.update(shown, description=str(point), completed=counts.num_ok + counts.num_failed, figures=figures)

        show(Counts())
        return processes.measure(show, interruption)


def _row(load: Load, case: str, point: Point, records: Records, interruption: Interruption) -> Row:
    batch = most_at_once(records) if point.streams is None else point.streams
    row = {"case": case, "batch": batch, **measure(records, load.settings.limits()), **load.describe(point)}
    return row | ({"interrupted": True} if interruption.has_come else {})


def _show(rows: list[Row], runs: list[tuple[str, Records]], load: Load, case: str, output: Output) -> None:
    # A local server runs on this machine's GPU, if there is one; of another machine nothing is known.
    results = collect_results(rows, device="cuda" if load.target.is_local else "cpu")
    path = write_results(results, output.folder, case)
    title = f"{case} at {load.settings.url}, {load.settings.api}"
    if output.as_json:
        sys.stdout.write(results.as_json())
    else:
        Console().print(report.table(results.rows, title))
    for line in report.warnings(results.rows):
        _notes().print(f"WARNING: {line}", style="bold red", soft_wrap=True, highlight=False, markup=False)
    if output.png is not None:
        plots.draw(output.png, runs, title)
        _say(f"picture written to {output.png}")
    _say(f"written to {path}")


def _read_data(settings: LoadSettings, seed: int) -> DataSet | Trace | None:
    if settings.dataset is not None:
        return read_data_set(Path(settings.dataset), settings.output_len)
    if settings.trace is None:
        return None
    unit, speed, output_len = settings.trace_unit, settings.trace_speed, settings.output_len
    return Trace(read_trace(Path(settings.trace), unit=unit, speed=speed, output_len=output_len), str(seed))


def _body_format(settings: LoadSettings, model: str) -> BodyFormat:
    extra = dict(settings.extra_body or {})
    flags = (settings.sends_ignore_eos, settings.include_usage)
    return BodyFormat(settings.api, model, settings.temperature, *flags, extra)


def _check_files(point: Point, num_processes: int) -> None:
    """Refuse more streams than a process may have connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = -(-(point.streams or 0) // num_processes) + _OTHER_FILES
    if most != resource.RLIM_INFINITY and needed > most:
        raise ConfigError(
            f"{point} need {needed} open files in each client process, {most} are allowed; give more --processes or "
            "raise `ulimit -Hn`"
        )


def _notes() -> Console:
    return Console(stderr=True)


def _say(text: str) -> None:
    _notes().print(text, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _progress() -> Iterator[Progress]:
    console = _notes()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        yield bar
