"""The measurements, one function each: what is run, how often, and what comes back. Each leaves nothing behind.

Times are in seconds, one number per trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import faults, rest, speed
from benchmarks.launcher import Launcher, LaunchError, Shape
from benchmarks.ours import Ours
from benchmarks.steplog import NotReachedError
from benchmarks.torchrun import Torchrun
from nodeagent.local import power
from nodeagent.workers.linux import stat_fields

START_TIMEOUT = 120.0
WARM_UP = 3.0
"""Seconds of steps before speed is measured."""
Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effort:
    """How often each thing is done: nodeagent, torchrun."""

    worker_kills: tuple[int, int] = (20, 5)
    node_kills: tuple[int, int] = (5, 3)
    joins: tuple[int, int] = (5, 3)
    turns: int = 100
    """Of 0.7 s, when steps per second are measured."""
    rest_window: float = 30.0


QUICK = Effort((2, 1), (1, 1), (1, 1), 5, 3.0)

FULL_GANG = Shape()
SHRINKING = Shape(least=1)
GROWING = Shape(most=3)
FLAT_OUT = Shape(step_delay=0.0, ckpt_every=100)
IDLE = Shape(workers=4, step_delay=1.0)
"""At rest: eight workers that do next to nothing."""


def worker_killed(folder: Path, effort: Effort) -> Results:
    """kill -9 of a worker, to the first step of the re-formed gang."""
    return _both(folder, FULL_GANG, effort.worker_kills, lambda t: faults.kill_worker(t, FULL_GANG.world))


def node_killed(folder: Path, effort: Effort) -> Results:
    """Power cut of one of two nodes, to the first step of the gang on the other."""
    full, left = SHRINKING.world, SHRINKING.least * SHRINKING.workers
    return _both(folder, SHRINKING, effort.node_kills, lambda t: faults.kill_node(t, full, left))


def node_joins(folder: Path, effort: Effort) -> Results:
    """A third node joins two: how long training stands still."""
    before, after = GROWING.world, GROWING.most * GROWING.workers
    return _both(folder, GROWING, effort.joins, lambda t: faults.join_node(t, "n3", before, after))


def steps_per_second(folder: Path, effort: Effort) -> Results:
    """Undisturbed steps per second, both launchers in turns, torchrun at its defaults; one number per turn."""
    with (
        Torchrun(folder / "torchrun", FLAT_OUT, tuned=False) as torchrun,
        Ours(folder / "nodeagent", FLAT_OUT) as ours,
    ):
        for training in (torchrun, ours):
            training.log.wait(FLAT_OUT.world, START_TIMEOUT, check=training.check)
        time.sleep(WARM_UP)
        rates, bare = speed.in_turns(ours, torchrun, effort.turns)
        for training in (torchrun, ours):
            if len(training.log.gangs()) > 1:
                raise NotReachedError("a gang was re-formed while speed was measured: is the machine overloaded?")
    return {"nodeagent": rates, "torchrun": bare}


def at_rest(folder: Path, effort: Effort) -> Results:
    """Memory and CPU per kind of process: without a job, and with eight workers."""
    out: Results = {}
    with Ours(folder / "no-job", None) as ours:
        time.sleep(WARM_UP)
        out["no job"] = _costs(_kinds(ours), effort)
    with Ours(folder / "nodeagent", IDLE) as ours:
        ours.log.wait(IDLE.world, START_TIMEOUT, check=ours.check)
        time.sleep(WARM_UP)
        out["8 workers"] = _costs(_kinds(ours), effort)
    with Torchrun(folder / "torchrun", IDLE) as torchrun:
        torchrun.log.wait(IDLE.world, START_TIMEOUT, check=torchrun.check)
        time.sleep(WARM_UP)
        out["torchrun, 8 workers"] = _costs({"launcher": torchrun.launcher_pids()}, effort)
    return out


PHASES: dict[str, Callable[[Path, Effort], Results]] = {
    "worker_killed": worker_killed,
    "node_killed": node_killed,
    "node_joins": node_joins,
    "steps_per_second": steps_per_second,
    "at_rest": at_rest,
}


@contextmanager
def _training(name: str, folder: Path, shape: Shape) -> Iterator[Launcher]:
    with Ours(folder, shape) if name == "nodeagent" else Torchrun(folder, shape) as training:
        try:
            training.log.wait(shape.world, START_TIMEOUT, check=training.check)
            yield training
        except NotReachedError as error:
            raise LaunchError(f"{name}: {error}\n{training.evidence()}") from error


def _both(folder: Path, shape: Shape, trials: tuple[int, int], trial: Callable[[Launcher], float]) -> Results:
    out: Results = {}
    for name, count in zip(("nodeagent", "torchrun"), trials, strict=True):
        with _training(name, folder / name, shape) as training:
            out[name] = []
            for _ in range(count):
                out[name].append(trial(training))
                print(f"  {name}: {out[name][-1]:.3f} s", flush=True)
    return out


def _kinds(ours: Ours) -> dict[str, list[int]]:
    """The processes of nodeagent, without the workers: what a node runs, and the store that the cluster shares."""
    status = ours.status()
    kinds = {
        "agent": [node["agent_pid"] for node in status["nodes"]],
        "shim": [],
        "watchdog": [],
        "standby": [],
        "workers": [],
    }
    if ours.shape is not None:
        for pod in ours.job()["pods"]:
            kinds["shim"].append(pod["shim_pid"])
            kinds["standby"].append(pod["standby_pid"])
            kinds["workers"] += [worker["pid"] for worker in pod["workers"]]
    known = {pid for pids in kinds.values() for pid in pids}
    ours_all = power.processes(ours.cluster().uid)
    kinds["watchdog"] = sorted(pid for pid in ours_all - known if _parent(pid) in kinds["shim"])
    known |= set(kinds["watchdog"])
    kinds["rendezvous stores, parked workers"] = sorted(ours_all - known)
    kinds["redis (one per cluster)"] = [status["redis"]["pid"]]
    del kinds["workers"]
    return kinds


def _parent(pid: int) -> int | None:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def _costs(kinds: dict[str, list[int]], effort: Effort) -> dict[str, dict[str, float]]:
    return {kind: cost.as_json() for kind, cost in rest.measure(kinds, effort.rest_window).items()}
