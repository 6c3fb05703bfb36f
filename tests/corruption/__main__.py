"""``python -m tests.corruption --seed 7 --cases 2000``: damage models, show those not met as they should be."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.corruption.driver import find_fault, run_cases
from tests.corruption.models import write_models


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--all", action="store_true", help="show cases without a fault as well")
    options = parser.parse_args()
    codes: Counter[int | None] = Counter()
    start, num_faults, slowest, largest = time.perf_counter(), 0, 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        numbers = range(options.first, options.first + options.cases)
        for number, note, outcome in run_cases(Path(folder), options.seed, numbers):
            fault = find_fault(outcome)
            codes[outcome.code] += 1
            num_faults += fault is not None
            slowest, largest = max(slowest, outcome.seconds), max(largest, outcome.grown_bytes)
            if fault is not None or options.all:
                print(
                    f"case {number} of seed {options.seed}: {note}: {fault or outcome.err.strip()[-300:]!r}", flush=True
                )
    seconds = time.perf_counter() - start
    print(
        f"seed {options.seed}: {options.cases} cases in {seconds:.0f} s, exit codes {dict(codes)}, "
        f"slowest {slowest:.1f} s, at most {largest >> 20} MiB more: {num_faults} faults"
    )
    return int(num_faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
