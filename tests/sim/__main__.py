"""Run many worlds, or replay one: ``python -m tests.sim --seeds 200`` or ``--seed 123``."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import NamedTuple

os.environ["SLIPSTREAM_POISON"] = "1"

from tests.sim.world import World, run_seed


class Verdict(NamedTuple):
    seed: int
    num_steps: int
    num_preemptions: int
    error: str  # empty: all went well


class Kind(NamedTuple):
    """What the model of every world keeps; None: as the seed draws it."""

    is_recurrent: bool | None = None
    is_latent: bool | None = None
    is_sparse: bool | None = None
    is_block: bool | None = None
    is_cross: bool | None = None
    is_constrained: bool | None = None


def judge(seed: int, kind: Kind) -> Verdict:
    try:
        world = run_seed(seed, **kind._asdict())
    except Exception as error:
        return Verdict(seed, 0, 0, f"{type(error).__name__}: {error}")
    return Verdict(seed, world.num_steps, world.num_preemptions, "")


def verdicts(pool: ProcessPoolExecutor, seeds: Iterable[int], num_ahead: int, kind: Kind) -> Iterator[Verdict]:
    """In the order of seeds. Few are begun ahead: who has seen enough need not wait for the rest."""
    waiting = iter(seeds)
    begun = deque((seed, pool.submit(judge, seed, kind)) for seed in islice(waiting, num_ahead))
    while begun:
        seed, future = begun.popleft()
        try:
            verdict = future.result()
            begun.extend((seed, pool.submit(judge, seed, kind)) for seed in islice(waiting, 1))
        except BrokenProcessPool:
            # A fault can be bad enough to crash torch itself. Seeds near this one may have done it.
            yield Verdict(seed, 0, 0, "the process died")
            return
        yield verdict


def replay(seed: int, kind: Kind) -> int:
    """One seed with its course of events; the same every time."""
    world = World(seed, **kind._asdict())
    try:
        world.run()
    except Exception:
        print("\n".join(world.trace))
        traceback.print_exc()
        return 1
    print("\n".join(world.trace))
    print(f"seed {seed}: right, {world.num_steps} steps, {world.num_preemptions} preemptions")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one, with a trace")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--recurrent", action="store_true", help="a model with states in every world, not in a sixth")
    parser.add_argument("--latent", action="store_true", help="a model with latents in every world, not in a seventh")
    parser.add_argument("--sparse", action="store_true", help="a model that chooses latents in every world")
    parser.add_argument("--block", action="store_true", help="a head that drafts blocks in every world")
    parser.add_argument("--cross", action="store_true", help="a model with a source encoder in every world")
    parser.add_argument("--constrained", action="store_true", help="requests with grammars in every world")
    options = parser.parse_args()
    names = ("recurrent", "latent", "sparse", "block", "cross", "constrained")
    kind = Kind(*(getattr(options, name) or None for name in names))
    if options.seed is not None:
        return replay(options.seed, kind)
    start, failed, steps, preemptions = time.perf_counter(), [], 0, 0
    with ProcessPoolExecutor(options.jobs) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for done, verdict in enumerate(verdicts(pool, seeds, 2 * options.jobs, kind), 1):
            steps += verdict.num_steps
            preemptions += verdict.num_preemptions
            if verdict.error:
                failed.append(verdict.seed)
                print(f"seed {verdict.seed}: {verdict.error}", flush=True)
                if options.stop:
                    break
            if sys.stderr.isatty():
                print(f"\r{done} of {options.seeds}", end="", file=sys.stderr)
    seconds = time.perf_counter() - start
    print(
        f"{options.seeds} seeds, {steps} steps, {preemptions} preemptions in {seconds:.1f} s: "
        f"{options.seeds / seconds:.1f} seeds/s, {len(failed)} failed"
    )
    if failed:
        print(f"replay one with: make sim SEED={failed[0]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
