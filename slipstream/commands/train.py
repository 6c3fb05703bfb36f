"""``slipstream train``: a draft head for a model, trained on texts that the model itself generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slipstream.train.session import Report
from slipstream.train.settings import CommonSettings
from slipstream.train.trainer import Progress as Training

_Settings = TypeVar("_Settings", bound=CommonSettings)


def run(settings: _Settings, method: str, train: Callable[[_Settings, Report], Training]) -> int:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    times, hidden = (TimeElapsedColumn(), TimeRemainingColumn()), not console.is_terminal
    with Progress(*columns, *times, console=console, transient=True, disable=hidden) as bar:
        tasks: dict[str, TaskID] = {}
        shown = -1

        def show(name: str, text: str, done: float, total: float) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(text, total=total)
                if hidden and name != "training":
                    say(f"{text}: {total:,.0f}")  # without a terminal there is no progress bar
            bar.update(tasks[name], description=text, completed=done, total=total)

        def on_step(training: Training, share: float) -> None:
            text = f"step {training.step}, loss {training.losses[-1]:.3f}, held out {shares(training.acceptance[-1])}"
            show("training", text, min(1.0, share), 1.0)
            nonlocal shown
            if training.measured_at[-1] > shown:  # one line per measurement, which stays in a log
                shown = training.measured_at[-1]
                say(text)

        def say(line: str) -> None:
            bar.console.print(line, highlight=False, soft_wrap=True, markup=False)

        training = train(settings, Report(say, lambda what, done, total: show(what, what, done, total), on_step))
    length = 1 + sum(training.acceptance[-1])
    console.print(
        f"held out, greedy: {shares(training.acceptance[-1])} accepted by position, {length:.2f} tokens a step with "
        f"{len(training.acceptance[-1])} drafts",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"written to {settings.out}; slipstream generate ... --speculate {method} --draft-model {settings.out}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    return 0


def shares(acceptance: list[float]) -> str:
    return " ".join(f"{share:.0%}" for share in acceptance)
