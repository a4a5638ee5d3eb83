"""Many random schedules at once, on all cores: ``python -m tests.sim.many --help``. What ``make sim`` runs."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Protocol

import structlog

from tests.sim import roles, schedule, teams
from tests.sim.test_random import REPLAY

LIMIT = 1800
"""Seconds of CPU that one schedule may take: then it hangs in a place where virtual time stands still."""
BATCH = 20
"""Schedules after which a process is replaced, so that none grows."""
BINS = (3, 9, 25, 50, 100, 201)


class Drawn(Protocol):
    """What is counted of a cluster that a seed stands for."""

    @property
    def nodes(self) -> int: ...

    @property
    def jobs(self) -> Sized: ...


@dataclass(frozen=True)
class Outcome:
    """Of one schedule."""

    seed: int
    nodes: int
    jobs: int
    cpu: float
    error: str


def _hangs(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"the schedule took more than {LIMIT} s of CPU")


@dataclass(frozen=True)
class Kind:
    """One kind of schedule: what a seed stands for, and its run; ``tests/sim/test_KIND.py`` replays one."""

    drawn: Callable[[int], Drawn]
    run: Callable[[int], object]


KINDS = {
    "random": Kind(schedule.shape, schedule.run),
    "teams": Kind(teams.drawn, teams.run),
    "roles": Kind(roles.drawn, roles.run),
}


def run(seed: int, kind: str = "random") -> Outcome:
    """In a process of the pool."""
    drawn, start, error = KINDS[kind].drawn(seed), time.process_time(), ""
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        KINDS[kind].run(seed)
    except BaseException as failure:
        if isinstance(failure, KeyboardInterrupt):
            raise
        error = "".join(traceback.format_exception(failure))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Outcome(seed, drawn.nodes, len(drawn.jobs), time.process_time() - start, error)


def _prepare() -> None:
    """A new process of the pool: quiet."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _hangs)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # records are many and live long: looking at all of them often finds nothing


def _distribution(done: list[Outcome]) -> str:
    counts: Counter[str] = Counter()
    for low, after in pairwise(BINS):
        counts[f"{low}..{after - 1}"] = sum(low <= one.nodes < after for one in done)
    return ", ".join(f"{count} of {name}" for name, count in counts.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.many", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    parser.add_argument("--teams", action="store_true", help="schedules of several queues (teams.py)")
    parser.add_argument("--roles", action="store_true", help="schedules of a job of several roles (roles.py)")
    parser.add_argument("--failures", type=Path, default=Path("sim-failures.txt"), help="where tracebacks go")
    asked = parser.parse_args()
    kind = "teams" if asked.teams else "roles" if asked.roles else "random"
    seeds = range(asked.first, asked.first + asked.schedules)
    start, shown, done = time.monotonic(), time.monotonic(), []
    failed: list[int] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([roles.__name__, schedule.__name__, teams.__name__])
    with context.Pool(asked.processes, _prepare, maxtasksperchild=BATCH) as pool:
        for one in pool.imap_unordered(partial(run, kind=kind), seeds):
            done.append(one)
            if one.error:
                failed.append(one.seed)
                with asked.failures.open("a") as file:
                    file.write(f"seed {one.seed}: {one.nodes} nodes, {one.jobs} jobs\n{one.error}\n")
                print(f"seed {one.seed} FAILED ({one.nodes} nodes, {one.jobs} jobs)", flush=True)
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(f"{len(done)} of {len(seeds)}, {len(failed)} failed, {shown - start:.0f} s", flush=True)
    cpu = sum(one.cpu for one in done)
    slowest = max(done, key=lambda one: one.cpu)
    print(f"{len(done)} schedules in {time.monotonic() - start:.0f} s ({cpu:.0f} s of CPU), {len(failed)} failed")
    print(f"nodes: {_distribution(done)}; jobs: {sum(one.jobs for one in done)}")
    print(f"slowest: seed {slowest.seed} with {slowest.nodes} nodes, {slowest.cpu:.0f} s of CPU")
    for seed in sorted(failed):
        print(f"replay: {REPLAY}={seed} python -m pytest tests/sim/test_{kind}.py")
    if failed:
        print(f"tracebacks: {asked.failures}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
