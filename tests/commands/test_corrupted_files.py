"""2,000 corruptions of tiny models: each is one line and exit code 2, or harmless, within seconds and without memory.

``python -m tests.corruption --seed 7`` runs the same with another seed, and shows a case again by its number.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.corruption.cases import GROUPS, intact_arguments, make_case
from tests.corruption.driver import Outcome, find_fault, run_cases
from tests.corruption.models import write_models

SEED, NUM_CASES, NUM_PROCESSES = 29, 2000, 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def run_process(arguments: list[str]) -> Outcome:
    """A command as the shell runs it. Its memory is not measured."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "slipstream", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=False)
    return Outcome(done.returncode, time.perf_counter() - start, 0, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_corrupted_files_are_refused_in_one_line_or_harmless(models: Path) -> None:
    faults, num_refused = [], 0
    for number, note, outcome in run_cases(models, SEED, range(NUM_CASES)):
        num_refused += outcome.code == 2
        if (fault := find_fault(outcome)) is not None:
            faults.append(f"case {number} of seed {SEED}, {note}: {fault}")
    assert not faults, f"{len(faults)} faults, among them:\n" + "\n".join(faults[:20])
    assert NUM_CASES // 2 < num_refused < NUM_CASES, "damage that is never noticed, or always, would prove little"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_process_of_its_own_ends_the_same_way(models: Path, tmp_path: Path) -> None:
    faults = []
    for number in range(0, NUM_CASES, NUM_CASES // NUM_PROCESSES):
        work = tmp_path / str(number)
        work.mkdir()
        case = make_case(models, work, SEED, number)
        if (fault := find_fault(run_process(case.arguments))) is not None:
            faults.append(f"case {number} of seed {SEED}, {case.note}: {fault}")
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_models_that_are_damaged_are_whole(models: Path) -> None:
    targets = {(target.model, target.method, target.head): target for group in GROUPS.values() for target in group}
    for target in targets.values():
        outcome = run_process(intact_arguments(models, target))
        assert outcome.code == 0, outcome.err


def judged(code: int | None = 2, seconds: float = 0.1, grown: int = 0, out: str = "", err: str = "error: x\n") -> bool:
    return find_fault(Outcome(code, seconds, grown, out, err)) is None


def test_what_counts_as_a_fault() -> None:
    assert judged()
    assert judged(code=0, out="text\n", err="")
    assert judged(out="text", err="error: the model produced logits that are not numbers; discarded\n")
    assert not judged(code=None)
    assert not judged(code=1)
    assert not judged(code=0, err="")
    assert not judged(err="error: x\nerror: y\n")
    assert not judged(err="Traceback\n")
    assert not judged(err="error: the engine stopped: OverflowError\n")
    assert not judged(out="text")
    assert not judged(seconds=10.5)
    assert not judged(grown=2 << 30)


@pytest.mark.slow
def test_a_case_is_the_same_whenever_it_is_made(models: Path, tmp_path: Path) -> None:
    made = []
    for attempt in ("first", "second"):
        files = []
        for number in range(200):
            work = tmp_path / attempt / str(number)
            work.mkdir(parents=True)
            note = make_case(models, work, SEED, number).note
            files.append((note, sorted(path.read_bytes() for path in work.rglob("*") if path.is_file())))
        made.append(files)
    assert made[0] == made[1]
